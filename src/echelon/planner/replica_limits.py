"""What replicas and compressed gradients need of a plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.plan import ParallelPlan, Precision, SyncPlan
from echelon.recipe.synchronization import PARAMETER_SERVER

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

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


def join_servers(layout: ParallelPlan, recipe: "Recipe", cluster: Cluster) -> ParallelPlan:
    """The layout of all workers of parameter servers: each is a process with a whole copy of the model.

    Raises PlanError for another layout, for more servers than processes, and on GPUs.
    """
    count = cluster.num_devices
    if cluster.kind == "cuda":
        raise PlanError(
            f"sync.name={PARAMETER_SERVER} is built for processes on CPUs only; use sync.name: every_step, local_sgd "
            "or diloco on GPUs."
        )
    if layout.strategy != "ddp":
        raise PlanError(
            f"parallel={layout.strategy} divides the model or its gradients, and with sync.name={PARAMETER_SERVER} "
            "each process has the whole model; use parallel: ddp."
        )
    if recipe.sync.servers > count:
        raise PlanError(
            f"sync.servers={recipe.sync.servers} is more than the {count} process{'' if count == 1 else 'es'} of the "
            f"run, each of which can be one server; use at most {count}."
        )
    return replace(layout, dp_replicate=1, num_replicas=count)


def name_living_on(recipe: "Recipe") -> str | None:
    """The key by which processes live on when one is lost; None if all start again."""
    value = recipe.fault.on_lost_process
    return None if value == "restart" else f"fault.on_lost_process={value}"


def refuse_living_on(recipe: "Recipe") -> None:
    """Raise ConfigError if processes shall live on when one is lost, where other launchers start them."""
    if (named := name_living_on(recipe)) is not None:
        raise ConfigError(
            f"{named} works only if echelon train starts all processes, on one machine or as the agent of "
            "each (--nodes): other launchers end all processes when one is lost. Start it without a launcher, or by "
            "echelon launch --to torchrun, slurm, or kubernetes as a PyTorchJob of several machines, or use "
            "fault.on_lost_process: restart."
        )


def describe_unproven(recipe: "Recipe", cluster: Cluster) -> list[str]:
    """Return a warning if processes shall live on when one is lost, and use GPUs."""
    if (named := name_living_on(recipe)) is None or cluster.kind != "cuda":
        return []
    return [
        f"{named} has not been tested on a machine with several GPUs; fault.on_lost_process: restart restarts from "
        "the newest checkpoint instead"
    ]


def resize(plan: ParallelPlan, num_replicas: int) -> ParallelPlan:
    """The plan of a quorum, or of parameter servers, with another number of replicas and the same global batch."""
    batch, each_reads = plan.global_batch_size, num_replicas * plan.dp_size * plan.micro_batch_size
    num_microbatches = -(-batch // each_reads)
    num_fill = each_reads * num_microbatches - batch
    return replace(plan, num_replicas=num_replicas, num_microbatches=num_microbatches, num_fill=num_fill)


def without_sync(plan: ParallelPlan) -> ParallelPlan:
    """The plan whose copies of the model agree with every_step instead."""
    return replace(plan, sync=SyncPlan(), num_replicas=1, dp_replicate=plan.num_whole_copies)
