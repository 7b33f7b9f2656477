"""A reduce-scatter for `fully_shard` over gloo that sends no more than it must.

Gloo computes a reduce-scatter as an all-reduce of the whole tensor, of which each rank keeps its part: twice the bytes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ExchangeReduceScatter:
    """Sends each rank its part of the gradient, and sums the parts received: (n-1)/n of the bytes over n ranks.

    Has the methods of torch's `ReduceScatter`, which `FSDPModule.set_custom_reduce_scatter` takes.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum over ranks to `output_tensor` [part]; `input_tensor` is [ranks * part]."""
        assert op == dist.ReduceOp.SUM, op
        assert not async_op, "FSDP waits for reductions on a CPU"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor.view(-1))
