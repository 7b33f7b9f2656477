"""One rank's processor computes a wrong number: the rank is named, and nothing is saved after it."""

import json
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch._dynamo.backends.debugging import aot_eager

from echelon.learn.distributed.mesh import Grid
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from echelon.run.training.replicas import OddPass, describe_compared, find_odd_passes
from echelon.run.training.training_step import TrainingStep
from tests.parity.training import PlantedWorkers, Row, raised_in_training, train, train_rank, with_ranks
from tests.unit.planner.test_search import fields

pytestmark = pytest.mark.dist

FAULTY = "model.layers.0.mlp.down_proj"


def train_with_fault(rank, world_size, path, plan, stop_at, faulty):
    """Train; on one rank the results of one layer have one wrong number from step 4 on. What it raised, as text."""
    call = TrainingStep.__call__

    def disturb(module, inputs, output):
        output.data.view(-1)[0] += 1e-3

    def disturbed(train_step, step, is_suppressed, measure):
        if step + 1 == 4 and rank == faulty:
            modules = dict(train_step.learner.engine.decoder.named_modules())
            modules[FAULTY].register_forward_hook(disturb)
        return call(train_step, step, is_suppressed, measure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", disturbed)
        return raised_in_training(rank, world_size, path, plan, stop_at)


def plant(pool, faulty):
    return PlantedWorkers(pool, train_with_fault, faulty)


def train_with_other_kernels(rank, world_size, path, plan, stop_at, faulty):
    """Train; what rank 1 compiles rounds otherwise, as a kernel that the compiler has tuned in its process may."""

    def compile_otherwise(graph, inputs):
        run = aot_eager(graph, inputs)
        return lambda *given: tuple(
            each * (1 + 1e-6) if rank and isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in run(*given)
        )

    train_rank(rank, world_size, path, plan, stop_at, "", compile_otherwise)


@pytest.mark.slow
def test_kernels_that_round_otherwise_are_no_fault(workers, text, tmp_path):
    pool = PlantedWorkers(workers, train_with_other_kernels, None)
    train(pool, checked(with_ranks(Row("ddp", compile=True), 2, micro_batch=2), every=2), tmp_path, text, steps=4)
    assert pool.raised == [None, None]


def checked(row, every):
    return replace(row, changes={"fault": {"verify_passes_every": every}, "checkpoint": {"every": 2}})


NAMED = [
    (with_ranks(Row("fsdp"), 2, micro_batch=2), 1, [0, 1], [0, 1]),  # of two nobody knows which one is right
    (with_ranks(Row("fsdp"), 4), 2, [2], [0, 1, 2, 3]),
    pytest.param(with_ranks(Row("zero1"), 4), 0, [0], [0, 1, 2, 3], marks=pytest.mark.slow),
    pytest.param(with_ranks(Row("hsdp"), 4), 3, [3], [0, 1, 2, 3], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("row", "faulty", "named", "peers"), NAMED, ids=str)
def test_the_rank_is_named_before_anything_is_saved(workers, text, tmp_path, row, faulty, named, peers):
    """Compared every 100 steps, and so only because a checkpoint is due after step 4."""
    pool = plant(workers, faulty)
    train(pool, checked(row, every=100), tmp_path, text, steps=6)
    assert len(pool.raised) == row.ranks and len(set(pool.raised)) == 1
    who = "ranks 0, 1 do not agree" if len(named) > 1 else f"rank {named[0]} computed something else than rank "
    assert pool.raised[0].startswith(f"after step 4: {who}"), pool.raised
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    [event] = [each for each in events if each["event"] == "passes_differ"]
    assert (event["step"], event["ranks"], event["peers"]) == (4, named, peers)
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-00000002"]


EQUAL = [
    with_ranks(Row("fsdp"), 2),
    *(
        pytest.param(row, marks=pytest.mark.slow)
        for row in (
            with_ranks(Row("zero2"), 4),
            Row({"tp": 2, "dp_shard": 2}, 4, micro_batch=2),
            Row({"pp": 2, "dp_shard": 2}, 4, micro_batch=1),
            Row({"cp": 2, "dp_shard": 2}, 4, micro_batch=2),
            Row({"dp_shard": 4, "ep": 2}, 4, 2, "mixtral"),
        )
    ),
]


@pytest.mark.parametrize("row", EQUAL, ids=str)
def test_ranks_that_compute_the_same_are_silent(workers, text, tmp_path, row):
    pool = plant(workers, faulty=None)
    train(pool, checked(row, every=1), tmp_path, text, steps=4)
    assert pool.raised == [None] * row.ranks


def test_only_ranks_that_share_a_stage_are_compared():
    """Ranks 0 and 2 are the first stage, 1 and 3 the second; replicas may differ unless they are one model."""
    plan = ParallelPlan("mapping", dp_shard=2, pp=2)
    stages = {peers[0]: peers for peers in Grid(plan).peers(("dp_shard",))}
    hashes = [(rank in stages[0],) for rank in range(4)]
    assert find_odd_passes(hashes, Grid(plan), False) == []
    hashes[stages[0][1]] = (7,)
    assert find_odd_passes(hashes, Grid(plan), False) == [OddPass(tuple(stages[0]), tuple(stages[0]))]
    apart = Grid(ParallelPlan("mapping", num_replicas=3))
    assert find_odd_passes([(1,), (2,), (1,)], apart, False) == []
    assert find_odd_passes([(1,), (2,), (1,)], apart, True) == [OddPass((1,), (0, 1, 2))]
    assert "nothing to compare" in describe_compared(ParallelPlan("mapping", tp=4))
    assert "passes: 8 ranks" in describe_compared(ParallelPlan("mapping", dp_replicate=2, dp_shard=4))
    with pytest.raises(ValidationError, match=r"fault\.verify_passes_every=5: .* only scores texts, and writes none"):
        Recipe.model_validate({**fields("ddp"), "fault": {"verify_passes_every": 5}, "objective": {"name": "reward"}})
