"""A group over ranks of several replicas: what fails on one rank of a replica fails on all, which go on together."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.learn.distributed.joint_group import JointGroup, OpenStep

pytestmark = pytest.mark.dist

RANKS, SIZE = 4, 2  # two replicas of two processes


LOST = r"(?i)connection (closed|reset)|pipe|socket|pair closure"


def connect(rank, path, step=None):
    """The group of the ranks with this one's index in their replica, and this rank's replica if it is the first."""
    replica, index = divmod(rank, SIZE)
    first = dist.new_group([0, 1], backend="gloo")
    own = None if replica else first
    store = dist.FileStore(f"{path}/index-{index}", SIZE)
    limit = timedelta(seconds=30)
    group = JointGroup(lambda: dist.ProcessGroupGloo(store, replica, SIZE, limit), replica, SIZE, own, "outer", step)
    group.enlist({rank: replica}, store)
    return group, own


def lose_one(rank, world_size, path):
    """Rank 3 leaves, so rank 1 cannot reach it; rank 0 can reach rank 2, which knows nothing of rank 3."""
    group, own = connect(rank, path)
    values = torch.tensor([float(rank)])
    dist.all_reduce(values, group=group)
    seen = [values.item(), dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)]
    if rank == 3:
        group.close()
    elif rank == 2:
        dist.all_reduce(values, group=group)
    else:
        with pytest.raises(RuntimeError, match=LOST):
            dist.all_reduce(values, group=group)
        inside = torch.ones(1)
        dist.all_reduce(inside, group=own)
        seen.append(inside.item())
    group.leave()
    return seen


def test_an_operation_fails_on_all_ranks_of_a_replica_or_on_none(workers, tmp_path):
    results = workers.run(lose_one, RANKS, str(tmp_path))
    assert [seen[:4] for seen in results] == [
        [2.0, 0, 2, "gloo"],
        [4.0, 0, 2, "gloo"],
        [2.0, 1, 2, "gloo"],
        [4.0, 1, 2, "gloo"],
    ]
    assert [seen[4:] for seen in results] == [[2.0], [2.0], [], []]


def lose_one_in_a_step(rank, world_size, path):
    """As `lose_one`, between the begin and the end of a step of the first replica."""
    step = OpenStep()
    group, own = connect(rank, path, step)
    values = torch.tensor([float(rank)])
    if rank < SIZE:
        step.begin()
    if rank == 3:
        group.close()
        group.leave()
        return []
    seen = []
    for _ in range(2):
        dist.all_reduce(values, group=group)
        inside = torch.ones(1)
        if own is not None:
            dist.all_reduce(inside, group=own)
        seen += [values.item(), inside.item()]
    if own is not None:
        seen.append(step.end(values.double(), own).item())
    group.leave()
    return seen


def test_the_ranks_of_a_replica_finish_a_step_together_if_one_of_them_has_lost_another_one(workers, tmp_path):
    """Rank 1 goes on to the end of the step, and takes there what rank 0 has."""
    first, lonely, other, lost = workers.run(lose_one_in_a_step, RANKS, str(tmp_path))
    assert first == [2.0, 2.0, 4.0, 2.0, 4.0] and lonely[1::2] == [2.0, 2.0] and lonely[-1] == 4.0
    assert other == [2.0, 1.0, 4.0, 1.0] and lost == []
