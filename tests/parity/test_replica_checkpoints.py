"""Replicas whose weights differ are all in a checkpoint, and another number of them goes on from it."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from echelon.ground.errors import CheckpointError
from echelon.learn.checkpoint.fill import load_alone, read_metadata
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.distributed.replica_names import count_replicas, match_replicas, replica_name, split_replica_name
from echelon.learn.model.sharding import whole
from echelon.planner.plan import ParallelPlan

pytestmark = pytest.mark.dist

WEIGHT, MOMENT, AGREED = "model.w", "optimizer.w.exp_avg", torch.arange(12.0).view(6, 2)


def test_names_are_told_apart():
    assert replica_name(3, WEIGHT) == "replica-0003.model.w"
    assert split_replica_name(replica_name(12345, WEIGHT)) == (12345, WEIGHT)
    assert split_replica_name(WEIGHT) == (None, WEIGHT)
    saved = [WEIGHT, *(replica_name(each, name) for each in range(2) for name in (WEIGHT, MOMENT))]
    assert count_replicas(saved) == 2
    wanted = {WEIGHT: "agreed", replica_name(3, WEIGHT): "own"}
    assert match_replicas(wanted, saved) == {WEIGHT: "agreed", replica_name(1, WEIGHT): "own"}
    assert match_replicas(wanted, [WEIGHT]) == wanted, "nothing to take it from"


def tensors_of(meshes, fill):
    """What a synchronizer saves: the weights that were agreed on, and each replica's own; sharded under some plans."""

    def place(tensor):
        return tensor.clone() if meshes.shard is None else distribute_tensor(tensor, meshes.shard, [Shard(0)])

    replica = meshes.place["replica"]
    own = {WEIGHT: AGREED + 100 * (replica + 1), MOMENT: AGREED - 100 * (replica + 1)}
    named = {WEIGHT: AGREED} | {replica_name(replica, name): each for name, each in own.items()}
    return {name: place(each if fill else torch.zeros_like(each)) for name, each in named.items()}


def save(rank, world_size, folder, plan):
    store = CheckpointStore(Path(folder), keep_last=1, asynchronous=True)
    store.save(1, tensors_of(build_mesh(plan, "cpu"), fill=True), {"train": {}})
    store.close()


def load(rank, world_size, folder, plan):
    """Which replica's weights and moments this rank's replica has read."""
    meshes = build_mesh(plan, "cpu")
    store = CheckpointStore(Path(folder), keep_last=1, asynchronous=True)
    tensors = tensors_of(meshes, fill=False)
    store.load(store.newest(), tensors)
    store.close()
    replica = meshes.place["replica"]
    assert torch.equal(whole(tensors[WEIGHT]), AGREED)
    weight, moment = (whole(tensors[replica_name(replica, name)]) for name in (WEIGHT, MOMENT))
    found = int((weight - AGREED)[0, 0]) // 100 - 1
    assert torch.equal(weight, AGREED + 100 * (found + 1)) and torch.equal(moment, AGREED - 100 * (found + 1))
    return replica, found


ONE = ParallelPlan("fsdp", dp_shard=2)
TWO = ParallelPlan("fsdp", num_replicas=2, dp_shard=2)
FOUR = ParallelPlan("ddp", num_replicas=4)


def test_two_replicas_go_on_as_two_one_and_four(workers, tmp_path):
    workers.run(save, 4, str(tmp_path), TWO)
    saved = read_metadata(tmp_path / "step-00000001").state_dict_metadata
    assert set(saved) == {WEIGHT, *(replica_name(each, name) for each in range(2) for name in (WEIGHT, MOMENT))}
    assert sorted(workers.run(load, 4, str(tmp_path), TWO)) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert workers.run(load, 2, str(tmp_path), ONE) == [(0, 0), (0, 0)]
    assert workers.run(load, 4, str(tmp_path), FOUR) == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_four_replicas_go_on_as_two(workers, tmp_path):
    workers.run(save, 4, str(tmp_path), FOUR)
    assert workers.run(load, 2, str(tmp_path), ParallelPlan("ddp", num_replicas=2)) == [(0, 0), (1, 1)]
    loaded = {WEIGHT: torch.zeros_like(AGREED)}
    load_alone(tmp_path / "step-00000001", loaded)  # as export and evaluation do
    assert torch.equal(loaded[WEIGHT], AGREED)


def refuse(rank, world_size, folder):
    """What a run says that looks for weights of its own in a checkpoint of one that had none."""
    store = CheckpointStore(Path(folder), keep_last=1, asynchronous=True)
    store.save(1, {WEIGHT: AGREED}, {"train": {}})
    store.wait()
    with pytest.raises(CheckpointError) as raised:
        store.load(store.newest(), {replica_name(rank, WEIGHT): torch.zeros_like(AGREED)})
    store.close()
    return str(raised.value)


def test_a_checkpoint_without_replicas_has_nothing_to_go_on_from(workers, tmp_path):
    for rank, message in enumerate(workers.run(refuse, 2, str(tmp_path))):
        assert f"has no {replica_name(rank, WEIGHT)}" in message


def needed_bytes(rank, world_size, folder):
    """What a rehearsal asks for when ranks hold different names: 2^50 bytes by name, one of them on both."""
    store = CheckpointStore(Path(folder), keep_last=1, asynchronous=True)
    large = torch.zeros(1, device="meta", dtype=torch.uint8).expand(2**50)
    with pytest.raises(CheckpointError) as raised:
        store.rehearse({"shared": large, **{f"{each} of {rank}": large for each in range(rank + 1)}})
    store.close()
    return str(raised.value)


def test_the_disk_must_hold_what_any_rank_has(workers, tmp_path):
    for message in workers.run(needed_bytes, 2, str(tmp_path)):
        assert f"a checkpoint needs about {4 * 2**50:,} bytes" in message
