"""Thousands of damaged inputs through the real loaders: a clean refusal each, or the right value.

Never a traceback, a hang, gigabytes of memory, foreign code run, or another value. `ECHELON_FUZZ_SEED` chooses other
inputs; the seed is printed, and each input's own generator is made of it, so that any one can be repeated.
"""

import os
import random
import re

import pytest
import torch.distributed as dist

from judge import Tally, limited_memory
from stored_files import Kind, StoredFiles, replaced

SEED = os.environ.get("ECHELON_FUZZ_SEED", "0")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The valid files, with a process group of this one process."""
    root = tmp_path_factory.mktemp("fuzz")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    files = StoredFiles(root, root / "marker")
    yield files
    files.close()
    dist.destroy_process_group()


@pytest.fixture
def tally(tmp_path_factory, stored, capsys):
    """Counts, and tells them at the end."""
    return Tally(stored.marker)


def fuzz_files(stored, tally, count):
    """So many damaged files, shared out over the kinds by their weights."""
    kinds = [kind for kind in stored.kinds for _ in range(kind.weight)]
    for number in range(count):
        kind: Kind = kinds[number % len(kinds)]
        rng = random.Random(f"{SEED} {kind.name} {number}")
        path, content = stored.damage(rng, kind)
        name = f"number {number}, seed {SEED}, {path.name}"
        words = "|".join((re.escape(path.name), re.escape(str(path.parent)), r"[a-z_]+(\.[a-z_]+)+"))
        with replaced(path, content, kind.signs):
            tally.judge(kind.name, name, kind.load, kind.is_right, words)


@pytest.mark.slow
def test_5000_damaged_files(stored, tally, capsys):
    with limited_memory():
        fuzz_files(stored, tally, int(os.environ.get("N", 5000)))
    with capsys.disabled():
        print(f"\nseed {SEED}\n{tally.table()}")
    assert not tally.failures, "\n\n".join(tally.failures)
