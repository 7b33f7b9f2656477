"""What replicas and compressed gradients need of a plan."""

from dataclasses import replace

from echelon.errors import ConfigError, PlanError
from echelon.planner.plan import ParallelPlan, Precision
from echelon.recipe.synchronization import APART

ANYWHERE = ("none", "bf16")
"""The methods of `sync.compress` that also work where parameters are sharded."""


def check_compression(plan: ParallelPlan) -> None:
    """Raise PlanError for a method that a sharded plan does not have, ConfigError for one beside fp16."""
    method = plan.sync.method
    if plan.num_replicas > 1 or method in ANYWHERE:
        return
    if plan.uses_fully_shard:
        raise PlanError(
            f"sync.compress.method={method} needs whole gradients on every process, and parallel={plan.strategy} "
            "shards or divides them; use parallel: ddp, or sync.compress.method=bf16."
        )
    if plan.precision.compute == "float16":
        raise ConfigError(
            f"sync.compress.method={method} does not work with train.precision=fp16, whose loss scale changes the "
            "size of gradients between steps; use train.precision=bf16, or sync.compress.method=bf16."
        )


def compressed_precision(precision: Precision, plan: ParallelPlan) -> Precision:
    """The precision of a plan that reduces shards of gradients in bf16 if the recipe says so."""
    reduces = plan.sync.method == "bf16" and plan.uses_fully_shard and plan.num_replicas == 1
    return replace(precision, reduce="bfloat16") if reduces else precision


def check_replicas(plan: ParallelPlan) -> None:
    """Raise PlanError for replicas whose weights are in host memory."""
    if plan.sync.name in APART and plan.cpu_offload:
        raise PlanError(
            f"sync.name={plan.sync.name} keeps the agreed weights on the device, and parallel.cpu_offload=true has the "
            "others in host memory; omit cpu_offload, or use sync.name: every_step."
        )
