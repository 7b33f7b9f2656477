"""Context parallelism: the ranks of the axis `cp` hold a part of each sequence, and only attention exchanges data."""

from typing import Any

import torch

from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.peers import GroupPeers
from echelon.learn.model.context_attention import Context, find_attention, use_context
from echelon.learn.parallel.activation import KEPT_OPERATIONS
from echelon.planner.plan import ParallelPlan


def apply_context(model: Any, plan: ParallelPlan, meshes: Meshes) -> Context | None:
    """Divide the attention of a model, on meta or not, as the plan says; None without context parallelism.

    Microbatches must be cut by `meshes.sequence_part`. Parameters keep their names and shapes.
    """
    if meshes.cp is None or plan.cp_method is None:
        return None
    context = Context(GroupPeers(meshes.cp), plan.cp_method, find_attention(model))
    if plan.cp_method == "ring":  # by then its operation is defined
        KEPT_OPERATIONS.add(torch.ops.echelon.ring_attention.default)
    use_context(model, context)
    return context
