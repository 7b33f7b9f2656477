"""The arrangement of ranks under several plans, compared with tables written by hand. No communication."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from echelon.learn.distributed.mesh import build_mesh
from echelon.planner.plan import ParallelPlan


@dataclass(frozen=True)
class Expected:
    """The expected groups and meshes of each rank."""

    plan: ParallelPlan
    data_size: int
    data_rank: list[int]
    loss: list[list[int]]
    shard: list[list[int]] | list[list[list[int]]]
    counts_data: list[int]
    counts_loss: list[int]
    outer: list[list[int]] | None = None
    pp: list[list[int]] | None = None
    tp: list[list[int]] | None = None
    cp: list[list[int]] | None = None
    experts: list[list[list[int]]] | None = None


TABLES = {
    "dp2 x tp2": Expected(
        ParallelPlan("mapping", dp_shard=2, tp=2),
        data_size=2,
        data_rank=[0, 0, 1, 1],
        loss=[[0, 2], [1, 3], [0, 2], [1, 3]],
        shard=[[0, 2], [1, 3], [0, 2], [1, 3]],
        counts_data=[0, 2],
        counts_loss=[0, 2],
        tp=[[0, 1], [0, 1], [2, 3], [2, 3]],
    ),
    "pp2 x dp2": Expected(
        ParallelPlan("mapping", pp=2, dp_shard=2),
        data_size=2,
        data_rank=[0, 1, 0, 1],
        loss=[[0, 1], [0, 1], [2, 3], [2, 3]],
        shard=[[0, 1], [0, 1], [2, 3], [2, 3]],
        counts_data=[0, 1],
        counts_loss=[2, 3],
        pp=[[0, 2], [1, 3], [0, 2], [1, 3]],
    ),
    "replica2 x shard2": Expected(
        ParallelPlan("mapping", num_replicas=2, dp_shard=2),
        data_size=4,
        data_rank=[0, 1, 2, 3],
        loss=[[0, 1], [0, 1], [2, 3], [2, 3]],
        shard=[[0, 1], [0, 1], [2, 3], [2, 3]],
        counts_data=[0, 1, 2, 3],
        counts_loss=[0, 1, 2, 3],
        outer=[[0, 2], [1, 3], [0, 2], [1, 3]],
    ),
    "replicate2 x shard2 x cp2": Expected(
        ParallelPlan("mapping", dp_replicate=2, dp_shard=2, cp=2),
        data_size=4,
        data_rank=[0, 0, 1, 1, 2, 2, 3, 3],
        loss=[list(range(8))] * 8,
        shard=[[[0, 1, 2, 3], [4, 5, 6, 7]]] * 8,
        counts_data=[0, 2, 4, 6],
        counts_loss=list(range(8)),
        cp=[[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]],
    ),
    "pp2 x replicate2 x tp2": Expected(
        ParallelPlan("mapping", pp=2, dp_replicate=2, tp=2),
        data_size=2,
        data_rank=[0, 0, 1, 1, 0, 0, 1, 1],
        loss=[[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]],
        shard=[
            [[0], [2]], [[1], [3]], [[0], [2]], [[1], [3]], [[4], [6]], [[5], [7]], [[4], [6]], [[5], [7]],
        ],
        counts_data=[0, 2],
        counts_loss=[4, 6],
        pp=[[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]],
        tp=[[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]],
    ),
    # SageMaker's DPT with two of each: rank = 4 * replica + 2 * stage + tensor
    "cluster": Expected(
        ParallelPlan("mapping", pp=2, dp_replicate=2, tp=2, order=("dp_replicate", "dp_shard", "cp", "pp", "tp")),
        data_size=2,
        data_rank=[0, 0, 0, 0, 1, 1, 1, 1],
        loss=[[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]],
        shard=[
            [[0], [4]], [[1], [5]], [[2], [6]], [[3], [7]], [[0], [4]], [[1], [5]], [[2], [6]], [[3], [7]],
        ],
        counts_data=[0, 4],
        counts_loss=[2, 6],
        pp=[[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]],
        tp=[[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]],
    ),
    # SageMaker's TPD on 8 ranks with two stages: the ranks of a pipeline are [0, 4], [1, 5], [2, 6] and [3, 7]
    "spread": Expected(
        ParallelPlan("mapping", pp=2, dp_shard=4, order=("tp", "pp", "dp_replicate", "dp_shard", "cp")),
        data_size=4,
        data_rank=[0, 1, 2, 3, 0, 1, 2, 3],
        loss=[[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4,
        shard=[[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4,
        counts_data=[0, 1, 2, 3],
        counts_loss=[4, 5, 6, 7],
        pp=[[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "tp outside of shard4, whose experts are on 2 ranks each": Expected(
        ParallelPlan("mapping", dp_shard=2, cp=2, ep=2, tp=2, order=("tp", "pp", "dp_replicate", "dp_shard", "cp")),
        data_size=2,
        data_rank=[0, 0, 1, 1, 0, 0, 1, 1],
        loss=[[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4,
        shard=[[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4,
        counts_data=[0, 2],
        counts_loss=[0, 1, 2, 3],
        tp=[[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]],
        cp=[[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]],
        experts=[[[[0, 4], [1, 5]], [[2, 6], [3, 7]]]] * 8,
    ),
    "ep of all shards": Expected(
        ParallelPlan("mapping", dp_shard=4, ep=4),
        data_size=4,
        data_rank=[0, 1, 2, 3],
        loss=[[0, 1, 2, 3]] * 4,
        shard=[[0, 1, 2, 3]] * 4,
        counts_data=[0, 1, 2, 3],
        counts_loss=[0, 1, 2, 3],
        experts=[[[0, 1, 2, 3]]] * 4,
    ),
}  # fmt: skip


def build_as(rank, plan):
    """The groups and meshes of a rank, as lists of ranks, and the number of groups created."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        meshes = build_mesh(plan, "cpu")
        ranks = {
            name: None if group is None else dist.get_process_group_ranks(group)
            for name, group in (("loss", meshes.loss), ("outer", meshes.outer), ("pp", meshes.pp), ("cp", meshes.cp))
        }
        for name, mesh in (("shard", meshes.shard), ("tp", meshes.tp), ("experts", meshes.experts)):
            ranks[name] = None if mesh is None else mesh.mesh.tolist()
        assert meshes.everyone is dist.group.WORLD
        return meshes, ranks, len(dist.distributed_c10d._world.pg_map) - 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("expected", TABLES.values(), ids=TABLES)
def test_every_rank_of_a_plan(expected):
    for rank in range(expected.plan.world_size):
        meshes, ranks, _ = build_as(rank, expected.plan)
        assert (meshes.data_rank, meshes.data_size) == (expected.data_rank[rank], expected.data_size)
        assert meshes.num_devices == expected.plan.world_size
        for name, found in ranks.items():
            table = getattr(expected, name)
            assert found == (None if table is None else table[rank]), (name, rank)
        assert meshes.counts_data == (rank in expected.counts_data)
        assert meshes.counts_loss == (rank in expected.counts_loss)


def test_weights_divided_over_two_meshes_have_a_mesh_in_common():
    """`fully_shard` shards a tensor-parallel weight, and expert-parallel ones, on a mesh that concatenates both."""
    plan = ParallelPlan("mapping", dp_replicate=2, dp_shard=2, ep=2, tp=2, order=TABLES["spread"].plan.order)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        meshes = build_mesh(plan, "cpu")
        linear = nn.Linear(4, 8, device="meta")
        parallelize_module(linear, meshes.tp, ColwiseParallel())
        fully_shard(linear, mesh=meshes.shard)
        assert linear.weight.device_mesh.mesh_dim_names == ("dp_replicate", "shard", "tp")
        assert linear.weight.device_mesh.mesh.tolist() == [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
        assert linear.weight.to_local().shape == (2, 4)
        expert = distribute_tensor(torch.empty(4, 2, device="meta"), meshes.experts["ep"], [Shard(0)])
        assert expert.device_mesh._get_root_mesh() is meshes.tp._get_root_mesh()
    finally:
        dist.destroy_process_group()


PLANS = {
    "one process": (ParallelPlan("ddp"), 0),
    "ddp": (ParallelPlan("ddp", dp_replicate=4), 0),
    "fsdp": (ParallelPlan("fsdp", dp_shard=4), 0),
    "offloaded": (ParallelPlan("fsdp", cpu_offload=True), 0),
    "hsdp": (ParallelPlan("hsdp", dp_replicate=2, dp_shard=2), 2),  # with 4 ranks: one group of replicas, one of shards
}


@pytest.mark.parametrize(("plan", "num_groups"), PLANS.values(), ids=PLANS)
def test_data_parallelism_creates_no_unneeded_groups(plan, num_groups):
    _, ranks, made = build_as(0, plan)
    assert ranks["loss"] == list(range(plan.world_size))
    assert made == num_groups
