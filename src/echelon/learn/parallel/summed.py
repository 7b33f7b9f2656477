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
        trained = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        for each in trained.values():  # a replica may not have used a parameter that another one has
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        for bucket in divide({name: each.grad for name, each in trained.items() if each.grad is not None}):
            flat = flatten(bucket)
            dist.all_reduce(flat)
            write_back(flat, bucket)
