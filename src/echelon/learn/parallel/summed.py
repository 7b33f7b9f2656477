"""The sum of gradients over the replicas of a quorum, whose group changes when one is lost or joins."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from echelon.learn.distributed.joint_group import together
from echelon.learn.model.sharding import local_part
from echelon.learn.reduction.reducer import divide, flatten, write_back


@torch.no_grad()
def sum_gradients(trained: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients by their sums over a group, in fp32: this rank's part of each. Collective.

    Args:
        trained: the parameters that train, the same parts of the same ones on each rank of the group.
    """
    for parameter in trained.values():  # a replica may not have used a parameter that another one has
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = {name: local_part(parameter.grad) for name, parameter in trained.items() if parameter.grad is not None}
    with together(group):  # stages of a pipeline have gradients of different sizes
        for bucket in divide(gradients):
            flat = flatten(bucket)
            dist.all_reduce(flat, group=group)
            write_back(flat, bucket)
