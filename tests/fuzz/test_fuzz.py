"""Loads thousands of damaged inputs with the real loaders: each is refused cleanly or gives the right value.

A traceback, a hang, excessive memory, execution of foreign code, or a wrong value fails the test. `ECHELON_FUZZ_SEED`
selects other inputs. The seed is printed, and each input has its own generator, from the seed and the input's number.
The tests of one kind of file and the mixed ones have different inputs.
"""

import fnmatch
import os
import random
import re
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist

from echelon.foreign.zero_folder import read_zero_folder
from echelon.recipe.document import Recipe
from tests.fuzz.damage import ODD_FILES, damage_bytes, foreign_files, put_odd_file
from tests.fuzz.judge import Tally, limited_memory
from tests.fuzz.recall import recalled, undamaged
from tests.fuzz.recipes import CLUSTERS, base_texts, damage_text, is_valid, nothing_asked, plan_recipe, random_overrides
from tests.fuzz.run_folder_files import SMALL_FILES, RunFolderFiles
from tests.fuzz.stored_files import StoredFiles, digest, replaced
from tests.unit.foreign.test_zero_folder import write as write_zero

SEED = os.environ.get("ECHELON_FUZZ_SEED", "0")
THOUSAND = int(os.environ.get("ECHELON_FUZZ_COUNT", "1000"))  # damages of each file
NUM_KINDS = 23  # of stored files
A_KEY = r"[a-z_]+(\.[a-z_0-9]+)+"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The valid files, with a process group of this one process."""
    root = tmp_path_factory.mktemp("fuzz")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with recalled(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)  # outside the repository, whose state every start of a run would ask git for
        with undamaged():
            files = StoredFiles(root, root / "marker")
        yield files
        files.close()
    dist.destroy_process_group()


def words_for(path):
    """What the refusal of a damaged file must name: the file, its folder or a key."""
    return "|".join((re.escape(path.name), re.escape(str(path.parent)), A_KEY))


def fuzz_files(stored, tally, count, folder, kinds=None):
    """Test `count` damaged files, distributed over the kinds, by default over all by their weights."""
    kinds = kinds or [kind for kind in stored.kinds for _ in range(kind.weight)]
    for number in range(count):
        kind = kinds[number % len(kinds)]
        rng = random.Random(f"{SEED} {kind.name} {number} of {len(kinds)}")
        path, content = stored.damage(rng, kind)
        named = f"number {number}, seed {SEED}, {path.name}"
        with replaced(path, content, kind.signs):
            same = (kind.name, path.name, sha256(content).digest() if isinstance(content, bytes) else content)
            tally.judge(kind.name, named, kind.load, kind.is_right, words_for(path), same)


def fuzz_run_folder(stored, tally, count, folder, pattern="*"):
    """Test `count` damages to the small files of a run folder, distributed over the files that match a pattern."""
    files = RunFolderFiles(stored, folder)
    names = [name for name in files.files if fnmatch.fnmatchcase(name, pattern)]
    for number in range(count):
        name = names[number % len(names)]
        rng = random.Random(f"{SEED} {name} {number} of {len(names)}")
        what = files.damage(rng, name)
        words = re.escape(name) if files.may_refuse(name, what) else "(?!)"
        if name == "recipe.yaml":  # other values of a recipe are told by their keys
            words += f"|{A_KEY}"
        kind = f"run folder: {files.pattern_of(name)}"
        named = f"number {number}, seed {SEED}, {what}"
        everything = number % 50 == 0
        use, same = partial(files.use, everything), None if everything else files.identify(name, what)
        tally.judge(kind, named, use, files.expected.__eq__, words, same)
        files.restore()


def fuzz_recipes(stored, tally, count, folder):
    """Test `count` recipes: half with damaged text, half with random overrides."""
    texts = base_texts(Path(__file__).parents[2] / "recipes", stored.single)
    path = folder / "recipe.yaml"
    words = "|".join((re.escape(path.name), "command line", A_KEY, *Recipe.model_fields))
    for number in range(count):
        kind = "recipe: text" if number % 2 else "recipe: overrides"
        rng = random.Random(f"{SEED} {kind} {number}")
        base, cluster = rng.choice(sorted(texts)), rng.choice(CLUSTERS)
        overrides = [] if number % 2 else random_overrides(rng, stored.marker)
        path.write_bytes(damage_text(rng, texts[base], stored.marker) if number % 2 else texts[base].encode())
        tally.judge(
            kind,
            f"number {number}, seed {SEED}, {base} {' '.join(overrides)[:200]}",
            partial(plan_recipe, path, overrides, cluster),
            partial(is_valid, cluster=cluster, folder=folder),
            words,
        )


@contextmanager
def judged(marker, capsys):
    """Judge inputs within the block; then print the counts of a long test, and fail if there are failures."""
    tally = Tally(marker)
    with limited_memory():
        yield tally
    with capsys.disabled():
        if tally.num_tried > 200:
            print(f"\n\nseed {SEED}\n{tally.table()}")
    if tally.failures:
        pytest.fail(f"seed {SEED}\n\n" + "\n\n".join(tally.failures), pytrace=False)


@pytest.mark.parametrize("count", [20, pytest.param(3_334, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fuzz", [fuzz_run_folder, fuzz_recipes, fuzz_files], ids=lambda fuzz: fuzz.__name__)
def test_damaged_inputs_are_refused_or_right(stored, tmp_path, monkeypatch, capsys, fuzz, count):
    monkeypatch.setattr("socket.create_connection", nothing_asked)
    with judged(stored.marker, capsys) as tally:
        fuzz(stored, tally, count, tmp_path)
    assert tally.num_tried == count


@pytest.mark.slow
@pytest.mark.parametrize("pattern", SMALL_FILES)
def test_a_file_of_a_run_is_damaged_a_thousand_times(stored, tmp_path, capsys, pattern):
    with judged(stored.marker, capsys) as tally:
        fuzz_run_folder(stored, tally, THOUSAND, tmp_path, pattern)
    assert tally.num_tried == THOUSAND


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_KINDS))
def test_stored_files_are_damaged_a_thousand_times(stored, tmp_path, capsys, number):
    assert len(stored.kinds) == NUM_KINDS
    kind = stored.kinds[number]
    with judged(stored.marker, capsys) as tally:
        fuzz_files(stored, tally, THOUSAND * len(kind.files), tmp_path, [kind])
    assert tally.num_tried == THOUSAND * len(kind.files)


@pytest.mark.slow
def test_nothing_waits_for_a_pipe_or_a_device(stored, tmp_path, capsys):
    """Each file that is read, replaced by each thing that has no end."""
    with judged(stored.marker, capsys) as tally:
        for kind in stored.kinds:
            for path, what in product(kind.files, ODD_FILES):
                if not (kind.signs and what == "a huge file"):
                    with replaced(path, what, kind.signs):
                        tally.judge(kind.name, f"{path.name}, {what}", kind.load, kind.is_right, words_for(path))
        files = RunFolderFiles(stored, tmp_path)
        use = partial(files.use, everything=True)
        for name, what in product(files.files, ODD_FILES):
            put_odd_file(files.folder.path / name, what)
            tally.judge(f"run folder: {name}", f"{name}, {what}", use, files.expected.__eq__, re.escape(name))
            files.restore()


@pytest.mark.parametrize("count", [7, pytest.param(THOUSAND, marks=pytest.mark.slow)])
def test_damaged_files_of_deepspeed_are_refused_or_right(tmp_path, capsys, count):
    """Each file of checkpoints of ZeRO stages 2 and 3: never other weights than those that were written."""
    flats = {2: [[[0.0, 1, 2, 3, 4], [9.0]], [[5.0, 6, 7, 8, -1], [10.0]]], 3: [[[0.0, 1, 2, 6, 7, 9]]] * 2}
    folders = {stage: write_zero(tmp_path / str(stage), stage, flats[stage]) for stage in flats}
    files = [path for folder in folders.values() for path in sorted(folder.glob("**/*")) if path.is_file()]
    marker = tmp_path / "marker"
    foreign = foreign_files(marker)

    def load(folder):
        tensors = read_zero_folder(folder).tensors
        return digest(sorted(tensors), *(tensors[name] for name in sorted(tensors)))

    expected = {stage: load(folder) for stage, folder in folders.items()}
    with judged(marker, capsys) as tally:
        for number, path in product(range(count), files):
            rng = random.Random(f"{SEED} {path.relative_to(tmp_path)} {number}")
            stage = int(path.relative_to(tmp_path).parts[0])
            choice = rng.random()
            if choice < 0.04:
                content = rng.choice(ODD_FILES)
            elif choice < 0.12:
                content = foreign[rng.choice(sorted(foreign))]
            else:
                content = damage_bytes(rng, path.read_bytes())
            named, words = f"number {number}, seed {SEED}, {path}", re.escape(str(folders[stage]))
            with replaced(path, content):
                tally.judge(path.name, named, partial(load, folders[stage]), expected[stage].__eq__, words)
    assert tally.num_tried == count * len(files)
