"""How gradients are summed over ranks with fewer bytes than they have."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from echelon.learn.reduction.methods import BLOCKS, HALF, ROUNDED, Encoded, PowerSGD, RandomK, Signs, TopK
from echelon.learn.reduction.reducer import Buckets, Reducer
from echelon.planner.plan import SyncPlan

__all__ = ["Buckets", "Reducer", "TopK", "build_reducer"]


def build_reducer(
    plan: SyncPlan, trained: Mapping[str, Tensor], group: dist.ProcessGroup, seed: int = 0
) -> Reducer | None:
    """Build what sums tensors under a plan; None if they are sent as they are.

    Args:
        trained: what will be summed, by name: only the shapes and the device are used.
        group: the ranks over which it is summed.
        seed: of random choices; the same on every rank.
    """
    match plan.method:
        case "bf16":
            return Encoded(ROUNDED, group)
        case "fp16":
            return Encoded(HALF, group)
        case "int8":
            return Encoded(BLOCKS, group)
        case "powersgd":
            return PowerSGD(trained, plan.rank, group, seed)
        case "topk":
            return TopK(trained, plan.fraction, group)
        case "randomk":
            return RandomK(trained, plan.fraction, group, seed)
        case "sign":
            return Signs(trained, group)
    return None
