"""The replicas of a quorum: processes with a whole copy of the model each, in a group that may change between steps."""

import torch
import torch.distributed as dist
from typing_extensions import override

from echelon.learn.distributed.isolation import Isolatable
from echelon.learn.parallel.data_parallel import Alone
from echelon.learn.reduction.reducer import divide, flatten, write_back


class Summed(Isolatable, Alone):
    """Gradients are summed over all processes of the default group, after the last microbatch.

    The default group is looked up in every step, because the quorum replaces it when a replica is lost or joins; a DDP
    module would have to be built again.
    """

    @torch.no_grad()
    @override
    def reduce(self) -> None:
        """Replace the gradients by their sums, in fp32. Collective."""
        if not self._sends or dist.get_world_size() == 1:
            return
        trained = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        for parameter in trained.values():  # a replica may not have used a parameter that another one has
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for bucket in divide(
            {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
        ):
            flat = flatten(bucket)
            dist.all_reduce(flat)
            write_back(flat, bucket)
