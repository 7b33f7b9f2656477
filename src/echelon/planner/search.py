"""Every allowed plan of a recipe on a cluster, with its memory, time and cost, ranked.

What the recipe sets is kept: `parallel`, `train.micro_batch_size`, `train.activation_checkpointing`. What it leaves to
echelon is tried. `resolve_plan` builds each plan, so a plan that it refuses is no candidate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from echelon.errors import ConfigError, PlanError
from echelon.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.choose import MEMORY_HEADROOM, MICRO_BATCH_TOKENS, find_replica, resolve_plan
from echelon.planner.forecast import Forecast, HourlyPrice, forecast_run
from echelon.planner.memory import MemoryEstimate, estimate_memory
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import ParallelPlan
from echelon.planner.stages import fits_schedule
from echelon.recipe.training import ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe import Recipe

Goal = Literal["time", "cost", "memory"]
_LARGEST = 2  # micro batches of each layout that are tried, beside the smallest
_LONG = 8192  # tokens of a sequence from which it may be divided among devices
_MAX_STAGES = 16
_POLICIES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
SHOWN = 10
"""Candidates in the table."""


@dataclass(frozen=True)
class RankedPlan:
    """One candidate: a plan on a cluster, with what it needs and takes.

    Attributes:
        usable_bytes: of each device, less the headroom; None if its memory is unknown.
        machines: the instance type and number, for the user; empty without one.
    """

    plan: ParallelPlan
    cluster: Cluster
    memory: MemoryEstimate
    usable_bytes: float | None
    forecast: Forecast
    machines: str = ""

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the usual headroom on each device, and fits into the memory of its machine."""
        return _fits(self.memory, self.usable_bytes, self.cluster)

    def degrees(self) -> dict[str, int]:
        """The degree of each axis."""
        return {axis: getattr(self.plan, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}

    def name(self) -> str:
        """The strategy and the degrees above 1, as in `pp+fsdp+tp: dp_shard 8, tp 8, pp 4 (interleaved)`."""
        words = [f"{axis} {degree}" for axis, degree in self.degrees().items() if degree > 1]
        schedule = f" ({self.plan.schedule})" if self.plan.schedule else ""
        offload = ", cpu_offload" if self.plan.cpu_offload else ""
        return f"{self.plan.strategy}: {', '.join(words) or '1 device'}{schedule}{offload}"

    def to_dict(self) -> dict[str, Any]:
        """The candidate as in the output of `--json`; None for what is unknown."""
        plan, forecast = self.plan, self.forecast
        return {
            "strategy": plan.strategy,
            "parallel": self.degrees(),
            "schedule": plan.schedule,
            "stages": list(plan.stages),
            "micro_batch_size": plan.micro_batch_size,
            "num_microbatches": plan.num_microbatches,
            "activation_checkpointing": plan.activation_checkpointing,
            "cpu_offload": plan.cpu_offload,
            "machines": self.machines or None,
            "num_devices": self.cluster.num_devices,
            "fits": self.fits,
            "memory_bytes": self.memory.total,
            "usable_bytes": None if self.usable_bytes is None else int(self.usable_bytes),
            "step_seconds": forecast.step.total,
            "seconds": forecast.step.to_dict(),
            "tokens_per_second": forecast.tokens_per_second,
            "limited_by": forecast.step.limit,
            "hours": forecast.hours,
            "usd": forecast.usd,
            "usd_per_billion_tokens": forecast.usd_per_billion_tokens,
        }


def search_plans(
    recipe: "Recipe",
    shape: ModelShape,
    cluster: Cluster,
    by: Goal = "time",
    price: HourlyPrice | None = None,
    machines: str = "",
    divide: bool = True,
) -> tuple[RankedPlan, ...]:
    """The candidates that fit in memory, best first, then the smallest of the others, so that there are at least ten.

    `divide`: try `pp` and `cp`, too. Raises PlanError or ConfigError, that of the first variant, if no plan is possible
    on these devices, and PlanError if their speed is unknown.
    """
    memory = cluster.accelerator.memory_bytes
    usable = None if memory is None else memory * (1 - MEMORY_HEADROOM)
    fitting: dict[ParallelPlan, RankedPlan] = {}
    refused: ConfigError | PlanError | None = None
    others: list[tuple[Recipe, ParallelPlan, MemoryEstimate]] = []

    def build(variant: "Recipe", plan: ParallelPlan, needs: MemoryEstimate) -> RankedPlan:
        return RankedPlan(plan, cluster, needs, usable, forecast_run(variant, shape, plan, cluster, price), machines)

    for offload in (False, True):
        if fitting:
            break
        for found in _list_plans(recipe, shape, cluster, divide, offload):
            if isinstance(found, ConfigError | PlanError):
                refused = refused or found
                continue
            if _fits(found[2], usable, cluster):
                key = _identify(found[1])
                fitting[key] = fitting.get(key) or build(*found)
            else:
                others.append(found)
    if not (fitting or others):
        assert refused is not None
        raise refused
    others.sort(key=lambda each: each[2].total)
    more = [build(*each) for each in others[: max(0, SHOWN - len(fitting))]]
    return rank_plans([*fitting.values(), *more], by)


def _identify(plan: ParallelPlan) -> ParallelPlan:
    """The plan without its name: with one microbatch ZeRO-1 and ZeRO-2 are the same."""
    when = "last" if plan.num_microbatches == 1 else plan.reduce_gradients
    return replace(plan, why=(), strategy="", reduce_gradients=when)


def _fits(needs: MemoryEstimate, usable: float | None, cluster: Cluster) -> bool:
    there = cluster.host_memory_bytes
    fits_host = there is None or needs.host * cluster.devices_per_node <= there
    return fits_host and (usable is None or needs.total <= usable)


def rank_plans(candidates: Sequence[RankedPlan], by: Goal) -> tuple[RankedPlan, ...]:
    """Candidates by what they take; those that do not fit come last, the smallest first."""
    return tuple(sorted(candidates, key=lambda each: _rank(each, by)))


def _rank(each: RankedPlan, by: Goal) -> tuple[bool, float, float]:
    seconds, memory = each.forecast.step.total, float(each.memory.total)
    if not each.fits:
        return True, memory, seconds
    if by == "memory":
        return False, memory, seconds
    cost = each.forecast.usd_per_billion_tokens
    if by == "cost" and cost is not None:
        return False, cost, seconds
    return False, seconds / each.forecast.tokens_per_step, memory


def _list_plans(
    recipe: "Recipe", shape: ModelShape, cluster: Cluster, divide: bool, offload: bool
) -> Iterator["tuple[Recipe, ParallelPlan, MemoryEstimate] | ConfigError | PlanError"]:
    """Each recipe that sets what this one leaves to echelon, with its plan and what it needs; or why it has none."""
    # Without a limit, resolve_plan refuses no plan for its memory: those that do not fit are answered as well.
    unlimited = replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=None), host_memory_bytes=None)
    train, length, memory = recipe.train, recipe.data.sequence_len, cluster.accelerator.memory_bytes
    fixed = "activation_checkpointing" in train.model_fields_set or train.activation_offloading
    for parallel in _list_layouts(recipe, shape, cluster, divide, offload):
        variant = recipe.model_copy(update={"parallel": parallel})
        try:
            first = resolve_plan(variant, shape, unlimited)
        except (ConfigError, PlanError) as error:
            yield error
            continue
        for plan in _vary(recipe, first, cluster.kind, fixed):
            needs = estimate_memory(shape, plan, length, cluster.kind)
            yield variant, plan, needs
            if memory is not None and needs.states > memory and plan.micro_batch_size == first.micro_batch_size:
                break  # neither checkpointing nor a smaller micro batch makes the states fit


def _vary(recipe: "Recipe", first: ParallelPlan, kind: DeviceKind, fixed: bool) -> Iterator[ParallelPlan]:
    """The plan with other micro batches and checkpointing, where the recipe leaves them to echelon."""
    ranks = first.num_replicas * first.dp_size
    shares = [size // ranks for size in recipe.batches.sizes]
    cap = max(1, MICRO_BATCH_TOKENS[kind] * first.cp // recipe.data.sequence_len)
    sizes = [size for size in divisors(gcd(*shares)) if size <= cap and _takes(first, shares, size)][::-1]
    if recipe.train.micro_batch_size != "auto" or getattr(recipe.parallel, "microbatches", None) or not sizes:
        sizes = [first.micro_batch_size]
    for size in dict.fromkeys((*sizes[:_LARGEST], sizes[-1])):
        sized = replace(first, micro_batch_size=size, num_microbatches=max(shares) // size)
        for policy in (first.activation_checkpointing,) if fixed else _POLICIES:
            yield replace(sized, activation_checkpointing=policy)


def _takes(plan: ParallelPlan, shares: Sequence[int], size: int) -> bool:
    """Whether the schedule of a pipeline takes every step with this micro batch."""
    return plan.schedule is None or all(fits_schedule(plan.schedule, plan.pp, share // size) for share in shares)


def _list_layouts(
    recipe: "Recipe", shape: ModelShape, cluster: Cluster, divide: bool, offload: bool
) -> Iterator["str | ParallelConfig"]:
    """The values of `parallel` to try; the recipe's own if it has one."""
    if recipe.parallel != "auto":
        if not offload:
            yield recipe.parallel
        return
    replica = find_replica(recipe, cluster)
    world = replica.num_devices
    if offload:
        if cluster.kind == "cuda":
            yield ParallelConfig(dp_shard=world, cpu_offload=True)
        return
    yield from ("ddp", "zero1", "zero2", "fsdp")
    if replica.num_nodes > 1:
        yield "hsdp"
    yield from _list_divided(recipe, shape, replica, divide)
    yield from (ParallelConfig(dp_shard=world, ep=ep) for ep in _powers(replica.devices_per_node)[1:] if shape.experts)


def _list_divided(recipe: "Recipe", shape: ModelShape, replica: Cluster, divide: bool) -> Iterator[ParallelConfig]:
    """Mappings that divide the model or its sequences."""
    local = replica.devices_per_node
    lengths = _powers(8) if divide and recipe.data.sequence_len >= _LONG else [1]
    stages = _powers(min(_MAX_STAGES, shape.num_layers)) if divide else [1]
    for tp, cp, pp in product(_powers(local), lengths, stages):
        rest, left = divmod(replica.num_devices, tp * cp * pp)
        if not left and (tp, cp, pp) != (1, 1, 1):
            yield from _divide(recipe, tp, cp, pp, rest, max(1, local // tp // cp))


def _divide(recipe: "Recipe", tp: int, cp: int, pp: int, rest: int, local: int) -> Iterator[ParallelConfig]:
    """Mappings for these degrees: `rest` ranks shard, or are replicas of each other, or shard inside a machine."""
    shares = {(1, rest), (rest, 1)} | ({(rest // local, local)} if rest % local == 0 else set())
    sequence = recipe.data.sequence_len % (tp * cp) == 0
    for replicate, shard in sorted(shares):
        for schedule in ("1f1b", "interleaved") if pp > 1 else (None,):
            yield ParallelConfig(
                dp_replicate=replicate,
                dp_shard=shard,
                tp=tp,
                cp=cp,
                pp=pp,
                sequence_parallel=True if tp > 1 and sequence else None,
                schedule=schedule,
            )


def _powers(limit: int) -> list[int]:
    """Powers of two up to a limit."""
    return [1 << place for place in range(max(1, limit).bit_length())]
