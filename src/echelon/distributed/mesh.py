"""The device mesh of a plan, and the meshes derived from it, each named by its use."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.planner.plan import ParallelPlan


@dataclass(frozen=True)
class Meshes:
    """The process groups a run needs.

    Attributes:
        world: every axis with more than one place, outermost first: dp_replicate, dp_shard.
        shard: what `fully_shard` receives: [dp_shard], or [dp_replicate, dp_shard] for hybrid sharding.
        loss: the ranks whose target counts, losses and metrics are summed.
        data_rank: this rank's place among the ranks that read different data, 0 <= data_rank < data_size.
    """

    world: DeviceMesh
    shard: DeviceMesh
    loss: dist.ProcessGroup
    data_rank: int
    data_size: int


def build_mesh(plan: ParallelPlan, device_type: str) -> Meshes:
    """Arrange the processes as the plan says. Collective: every rank calls it, after the process group exists."""
    world = init_device_mesh(
        device_type, (plan.dp_replicate, plan.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    shard = world if plan.dp_replicate > 1 else world["dp_shard"]
    assert dist.group.WORLD is not None
    return Meshes(
        world=world, shard=shard, loss=dist.group.WORLD, data_rank=dist.get_rank(), data_size=dist.get_world_size()
    )
