"""A group over ranks of several replicas: what fails on one rank of a replica fails on all, which go on together."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.learn.distributed.joint_group import JointGroup

pytestmark = pytest.mark.dist

RANKS, SIZE = 4, 2  # two replicas of two processes


def lose_one(rank, world_size, path):
    """Rank 3 leaves, so rank 1 cannot reach it; rank 0 can reach rank 2, which knows nothing of rank 3."""
    replica, index = divmod(rank, SIZE)
    first = dist.new_group([0, 1], backend="gloo")
    own = None if replica else first
    store = dist.FileStore(f"{path}/index-{index}", SIZE)
    limit = timedelta(seconds=30)
    group = JointGroup(lambda: dist.ProcessGroupGloo(store, replica, SIZE, limit), replica, SIZE, own, "outer")
    group.enlist({rank: replica}, store)
    values = torch.tensor([float(rank)])
    dist.all_reduce(values, group=group)
    seen = [values.item(), dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)]
    if rank == 3:
        group.close()
    elif rank == 2:
        dist.all_reduce(values, group=group)
    else:
        with pytest.raises(RuntimeError, match=r"(?i)connection (closed|reset)|pipe|socket|pair closure"):
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
