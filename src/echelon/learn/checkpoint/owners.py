"""Assigns each part of a checkpoint to one of the ranks that hold it, so that no other rank copies it for a save."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan


def find_owned(tensors: Mapping[str, Any], group: dist.ProcessGroup) -> frozenset[str]:
    """Return the names of the tensors that this rank copies and writes: its own, and its share of replicated ones.

    Collective over `group`. Ranks that hold the same part of a tensor share the work: all of them under DDP, those of
    the replicate axis under HSDP. DCP's planner, which also decides who writes, gives each part to the rank with the
    fewest bytes so far. So a save of only these tensors writes the same files as a save of all. The plan depends on
    names, shapes and dtypes only.

    Args:
        tensors: name to tensor or DTensor, as they will be saved; ranks may hold different names.
    """
    is_planner = dist.get_rank(group) == 0
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=is_planner)
    plans: list[SavePlan] | None = [SavePlan([])] * dist.get_world_size(group) if is_planner else None
    dist.gather_object(planner.create_local_plan(), plans, group=group, group_dst=0)
    shares = None
    if plans is not None:
        divided, _ = planner.create_global_plan(plans)
        shares = [frozenset(item.index.fqn for item in plan.items) for plan in divided]
    mine: list[frozenset[str]] = [frozenset()]
    dist.scatter_object_list(mine, shares, group=group, group_src=0)
    return mine[0]
