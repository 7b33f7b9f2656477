"""A micro batch that does not fit in memory: real processes, in one of which large allocations fail."""

import json
import re
import resource
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import echelon.learn.engines.native as native
from echelon.ground.stored import write_json
from echelon.learn.distributed.runtime import Runtime
from echelon.planner.hardware.heap import return_freed_memory
from echelon.planner.plan import load_plan
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from tests.cases import slow
from tests.families import small_config
from tests.parity.training import LOSS, Row, hashes, losses_of, prepare, read_rows, weight_difference

pytestmark = pytest.mark.dist

# Each tensor that an MLP makes of one sequence takes 4 MiB, [256, 4096] in fp32, and of 4 sequences 16 MiB. All other
# tensors, the gathered weights of a layer too, are smaller than that.
MODEL = {"config": {**small_config("llama"), "intermediate_size": 4096}}
ROW = {"model": MODEL, "data": {"sequence_len": 256}, "optim": {"warmup": 1}}
MIB = 1 << 20
STEPS, SHORT_RANK = 2, 1
FAILED = "can't allocate memory"
# Under a limit of the process, 4 sequences of 1024 tokens need at least 384 MiB for three such tensors in each of
# 2 layers, and 1 sequence a quarter of it. What a process allocates besides, such as buffers of its libraries, depends
# on the machine.
LONG_ROW = {**ROW, "data": {"sequence_len": 1024}}
SPARE = 256 * MIB


class LimitedTensors(TorchDispatchMode):
    """A scope in which a tensor of more than so many bytes cannot be allocated: torch's own error is raised."""

    def __init__(self, num_bytes):
        super().__init__()
        self._num_bytes = num_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes() > self._num_bytes:
                torch.empty(1 << 60, dtype=torch.uint8)
        return results


def limit_growth(num_bytes):
    """Limit the address space of this process to this many bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, most))


def take_freed_memory():
    """What this process holds of freed memory, in any arena of the heap: it could be used below every limit."""
    taken, failures = [], 0
    while failures < 64:
        try:
            taken.append(torch.empty(MIB, dtype=torch.uint8))
            failures = 0
        except RuntimeError:
            failures += 1
    return taken


@contextmanager
def limited(num_bytes):
    """A scope in which this process can allocate so many bytes in addition to what it uses."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_growth(4 * MIB)
    taken = take_freed_memory()
    limit_growth(num_bytes)
    try:
        assert taken
        with pytest.raises(RuntimeError, match=FAILED):
            torch.empty(num_bytes + MIB, dtype=torch.uint8)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def train_limited(rank, world_size, path, plan, limit, num_bytes):
    """Train; with a `limit`, rehearsals of one rank are limited by it to this many bytes.

    Returns the sizes that were rehearsed, and the messages of the allocations that failed in this process.
    """
    recipe, _ = load_recipe(Path(path))
    runtime = Runtime(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    return_freed_memory()
    rehearse, is_out_of_memory, tried, failures, decoders = (
        native.NativeEngine.rehearse, native.is_out_of_memory, [], [], [],
    )  # fmt: skip

    def rehearse_limited(engine, microbatch, num_microbatches, objective):
        assert not any(each() for each in decoders), "the engine of an earlier attempt still takes memory"
        decoders.append(weakref.ref(engine.decoder))
        tried.append((len(microbatch.input_ids), num_microbatches))
        if rank != SHORT_RANK or limit is None:
            return rehearse(engine, microbatch, num_microbatches, objective)
        with limit(num_bytes):
            return rehearse(engine, microbatch, num_microbatches, objective)

    def note_failure(error):
        failures.append(repr(error))
        return is_out_of_memory(error)

    with (
        mock.patch.object(native.NativeEngine, "rehearse", rehearse_limited),
        mock.patch.object(native, "is_out_of_memory", note_failure),
    ):
        trainer = build_trainer(recipe, plan, RunFolder(Path(recipe.run.dir)), runtime)
    trainer.fit()
    trainer.train_step.loader.close()
    trainer.saver.store.close()
    if trainer.accounting.journal is not None:
        trainer.accounting.journal.close()
    return tried, failures


@pytest.mark.parametrize(
    ("num_mib", "sizes"), [(12, [(4, 1), (2, 2)]), slow(6, [(4, 1), (2, 2), (1, 4)])], ids=["once", "twice"]
)
def test_every_rank_halves_and_the_losses_stay(workers, text, tmp_path, num_mib, sizes):
    halve_and_compare(workers, text, tmp_path, "fsdp", ROW, LimitedTensors, num_mib * MIB, [sizes])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "ddp", "zero1"])
def test_a_process_short_of_memory_halves(workers, text, tmp_path, parallel):
    endings = [[(4, 1), (2, 2)], [(4, 1), (2, 2), (1, 4)]]
    halve_and_compare(workers, text, tmp_path, parallel, LONG_ROW, limited, SPARE, endings)


def halve_and_compare(workers, text, tmp_path, parallel, changes, limit, num_bytes, expected):
    """Train freely and under the limit; the rehearsed sizes have to be one of the expected lists."""
    row = Row(parallel, ranks=2, micro_batch="auto", changes=changes)
    runs = {name: tmp_path / name / "run" for name in ("free", "limited")}
    endings = {}
    # The free run comes first, so that nothing remains to be imported under the limit.
    for name, each in (("free", None), ("limited", limit)):
        path, planned = prepare(row, tmp_path / name, text, STEPS)
        write_json(runs[name] / "estimate.json", {"memory": {}, "schedule": {"steps": STEPS}})
        endings[name] = workers.run(train_limited, 2, str(path), planned, each, num_bytes)
    assert endings["free"] == [([(4, 1)], [])] * 2
    assert not (runs["free"] / "plan.json").exists()

    (sizes, none), (same, failures) = endings["limited"]
    assert sizes == same and sizes in expected
    assert none == [] and len(failures) == len(sizes) - 1
    assert all(re.search(f"{FAILED}|bad_alloc|MemoryError", failure) for failure in failures), failures
    plan = load_plan(runs["limited"] / "plan.json")
    assert (plan.micro_batch_size, plan.num_microbatches) == sizes[-1]
    assert plan.why[-1].startswith(f"micro_batch_size auto: halved to {sizes[-1][0]}, because rank 1 ran out of memory")
    estimate = json.loads((runs["limited"] / "estimate.json").read_text())
    assert estimate["memory"]["activations"] > 0 and estimate["schedule"] == {"steps": STEPS}

    free, halved = read_rows(runs["free"]), read_rows(runs["limited"])
    assert hashes(halved) == hashes(free)
    assert losses_of(halved) == pytest.approx(losses_of(free), rel=LOSS)
    assert weight_difference(runs["limited"], runs["free"], STEPS) < 1e-5
