"""One bit of one rank's weights changes between two steps: the rank is named, and nothing wrong is saved."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.model.sharding import local_part
from echelon.planner.plan import ParallelPlan
from echelon.run.training.replicas import ReplicaDifference, compare_replicas
from echelon.run.training.training_step import TrainingStep
from tests.cases import slow
from tests.parity.training import PlantedWorkers, Row, raised_in_training, train, with_ranks

pytestmark = pytest.mark.dist

FLIPPED = "model.layers.0.self_attn.q_proj.weight"


def train_with_flip(rank, world_size, path, plan, stop_at, flipping):
    """Train; on one rank the lowest bit of one weight flips before step 4. What it raised, as text."""
    call = TrainingStep.__call__

    def flipped(train_step, step, is_suppressed, measure):
        if step + 1 == 4 and rank == flipping:
            weight = local_part(train_step.learner.engine.decoder.get_parameter(FLIPPED).detach())
            weight.view(torch.int32).view(-1)[:1].bitwise_xor_(torch.tensor(1, dtype=torch.int32))
        return call(train_step, step, is_suppressed, measure)

    with mock.patch.object(TrainingStep, "__call__", flipped):
        return raised_in_training(rank, world_size, path, plan, stop_at)


def plant(pool, flipping):
    return PlantedWorkers(pool, train_with_flip, flipping)


def checked(row, every, every_steps=2):
    return replace(row, changes={"fault": {"verify_replicas_every": every}, "checkpoint": {"every": every_steps}})


NAMED = [
    (with_ranks(Row("ddp"), 2, micro_batch=2), 1, [0, 1], [0, 1]),  # of two nobody knows which one is right
    (with_ranks(Row("ddp"), 4), 2, [2], [0, 1, 2, 3]),
    (with_ranks(Row("hsdp"), 4), 3, [1, 3], [1, 3]),
    slow(Row({"pp": 2, "dp_replicate": 2}, 4, micro_batch=1), 1, [0, 1], [0, 1]),
    slow(Row({"tp": 2, "dp_replicate": 2}, 4, micro_batch=2), 1, [1, 3], [1, 3]),
    slow(Row({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 4, 2, "mixtral"), 1, [1, 3], [1, 3]),
]


@pytest.mark.parametrize(("row", "flipping", "named", "replicas"), NAMED, ids=str)
def test_the_rank_is_named_before_anything_is_saved(workers, text, tmp_path, row, flipping, named, replicas):
    """Compared every 100 steps, and so only because a checkpoint is due after step 4."""
    pool = plant(workers, flipping)
    train(pool, checked(row, every=100), tmp_path, text, steps=6)
    assert len(pool.raised) == row.ranks and len(set(pool.raised)) == 1
    who = f"rank {', '.join(map(str, named))} {'have' if len(named) > 1 else 'has'}"
    assert pool.raised[0].startswith(f"after step 4: {who} "), pool.raised
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    [event] = [each for each in events if each["event"] == "replicas_differ"]
    assert (event["step"], event["ranks"], event["replicas"]) == (4, named, replicas)
    assert event["parameter"] in pool.raised[0] and event["num_parameters"] >= 1
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-00000002"]


def test_between_checkpoints(workers, text, tmp_path):
    pool = plant(workers, flipping=0)
    train(pool, checked(with_ranks(Row("ddp"), 4), every=5, every_steps=100), tmp_path, text, steps=8)
    assert all(each.startswith("after step 5: rank 0 has other weights than rank 1, 2, 3") for each in pool.raised)


@pytest.mark.parametrize("row", [with_ranks(Row("ddp"), 2), with_ranks(Row("hsdp"), 4)], ids=str)
def test_replicas_that_are_equal_are_silent(workers, text, tmp_path, row):
    pool = plant(workers, flipping=None)
    train(pool, checked(row, every=1), tmp_path, text, steps=4)
    assert pool.raised == [None] * row.ranks


def test_shards_have_no_replicas(workers, text, tmp_path):
    pool = plant(workers, flipping=1)
    train(pool, checked(with_ranks(Row("fsdp"), 2), every=1), tmp_path, text, steps=5)
    assert pool.raised == [None, None]


def weights_of(meshes):
    """A weight of each kind, the same on every rank: plain, sharded, divided by tensor parallelism, and left whole."""
    weights = {"model.plain": torch.arange(6.0)}
    if meshes.shard is not None:
        weights["model.sharded"] = distribute_tensor(torch.ones(4, 3), meshes.shard["shard"], [Shard(0)])
    if meshes.tp is not None:
        weights["model.divided"] = distribute_tensor(torch.ones(3, 4), meshes.tp, [Shard(1)])
        weights["model.whole"] = distribute_tensor(torch.ones(2, 2), meshes.tp, [Replicate()])
    return weights | {"optimizer.plain.exp_avg": torch.ones(6)}


def compare_with_flip(rank, world_size, plan, flipping, name):
    """What is found where one rank holds another number in one weight; the last stage has a weight more."""
    meshes = build_mesh(plan, "cpu")
    weights = weights_of(meshes)
    if meshes.place["pp"] == plan.pp - 1:
        weights = {"model.head": torch.ones(5), **weights}
    if rank == flipping:
        local_part(weights[name]).view(-1)[0] += 1
    return compare_replicas(weights, meshes)


PIPELINE = ParallelPlan("mapping", pp=2, dp_replicate=2)
TENSOR = ParallelPlan("mapping", dp_shard=2, tp=2)
COPIES = {
    "a stage is compared with its own copies": (PIPELINE, 3, "model.plain", (2, 3)),
    "a weight of one stage": (PIPELINE, 2, "model.head", (2, 3)),
    "a plain weight beside shards": (TENSOR, 1, "model.plain", (0, 1, 2, 3)),
    "a weight that tensor parallelism leaves whole": (TENSOR, 2, "model.whole", (0, 1, 2, 3)),
    "a weight that it divides": (TENSOR, 3, "model.divided", (1, 3)),
    "a shard": (TENSOR, 3, "model.sharded", (2, 3)),
    "replicas may differ": (ParallelPlan("mapping", num_replicas=2, dp_replicate=2), 1, "model.plain", (0, 1)),
}


@pytest.mark.parametrize(("plan", "flipping", "name", "copies"), COPIES.values(), ids=COPIES)
def test_along_every_axis_that_does_not_divide_a_weight(workers, plan, flipping, name, copies):
    for found in workers.run(compare_with_flip, 4, plan, flipping, name):
        [difference] = found
        odd = (flipping,) if len(copies) > 2 else copies
        assert difference == ReplicaDifference(odd, copies, name.removeprefix("model."), 1)


def test_what_may_differ_is_not_compared(workers):
    for plan, name in ((TENSOR, "optimizer.plain.exp_avg"), (ParallelPlan("mapping", num_replicas=4), "model.plain")):
        assert workers.run(compare_with_flip, 4, plan, 1, name) == [[]] * 4
