"""Every allowed plan of a recipe on a cluster, with its memory, time and cost, ranked.

What the recipe sets is kept: `parallel`, `train.micro_batch_size`, `train.activation_checkpointing`,
`train.activation_offloading`, `train.precision`, `sync`. `layout.py` lists what is tried where it leaves the
choice to echelon. `resolve_plan` builds each plan, so a plan that it refuses is no candidate.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.axes.data import STRATEGIES
from echelon.planner.choose import find_usable_bytes, resolve_plan
from echelon.planner.forecast import NO_HISTORY, Forecast, History, HourlyPrice, forecast_run
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.layout import list_divided, list_layouts, list_micro_batches, list_policies
from echelon.planner.memory import MemoryEstimate, add_rollout, estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.reliability import Goodput
from echelon.recipe.training import ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

Goal = Literal["time", "cost", "memory"]
_PLAN_FIELDS = (
    "micro_batch_size", "num_microbatches", "activation_checkpointing", "checkpoint_every", "mlp_tiles",
    "activation_offloading", "cpu_offload", "cp_method", "reshard_after_forward", "reduce_gradients",
)  # fmt: skip
_FORECAST = (
    "tokens_per_second", "hours", "usd", "usd_per_billion_tokens", "spot_usd", "spot_usd_per_billion_tokens"
)  # fmt: skip
_TIMED = ("step_seconds", "seconds", "goodput", "correction", "limited_by", *_FORECAST)
SHOWN = 10
"""Candidates in the table."""


@dataclass(frozen=True, kw_only=True)
class SizedPlan:
    """One candidate: a plan on a cluster, with the memory that it needs.

    Attributes:
        machines: the instance type and number, for the user; empty without one.
        parallel: the value of `parallel` that gives this plan.
    """

    plan: ParallelPlan
    cluster: Cluster
    memory: MemoryEstimate
    machines: str = ""
    parallel: str | ParallelConfig = "auto"

    @property
    def usable_bytes(self) -> float | None:
        """Of each device, less the headroom; None if its memory is unknown."""
        return find_usable_bytes(self.cluster)

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the usual headroom on each device, and fits into the memory of its machine."""
        return self.memory.fits(self.usable_bytes, self.cluster)

    def name(self) -> str:
        """The strategy and the degrees above 1, and what is special about them."""
        plan = self.plan
        options: list[str] = [] if plan.schedule is None else [plan.schedule]
        options += ["ulysses"] if plan.cp_method == "ulysses" else []
        keeps = plan.num_shards > 1 and not plan.stages and not plan.reshard_after_forward
        if keeps and plan.strategy not in STRATEGIES:
            options.append("zero2" if plan.reduce_gradients == "each" else "zero1")
        shown = f" ({', '.join(options)})" if options else ""
        offload = ", cpu_offload" if plan.cpu_offload else ""
        return f"{plan.strategy}: {plan.name_degrees() or '1 device'}{shown}{offload}"

    @property
    def activations(self) -> str:
        """How activations are kept, in a few words."""
        plan = self.plan
        every = f" every {plan.checkpoint_every}" if plan.checkpoint_every > 1 else ""
        tiles = f", MLP in {plan.mlp_tiles} tiles" if plan.mlp_tiles > 1 else ""
        return f"{plan.activation_checkpointing}{every}{tiles}" + (", offloaded" if plan.activation_offloading else "")

    def settings(self) -> dict[str, Any]:
        """The keys of a recipe that give this plan, with `parallel` and `train` as mappings."""
        plan, parallel = self.plan, self.parallel
        checkpointing: str | dict[str, int] = plan.activation_checkpointing
        if plan.checkpoint_every > 1:
            checkpointing = {"every": plan.checkpoint_every}
        if plan.mlp_tiles > 1:
            checkpointing = {"mlp_tiles": plan.mlp_tiles}
        train: dict[str, Any] = {"micro_batch_size": plan.micro_batch_size}
        if plan.activation_memory_budget is None:
            train["activation_checkpointing"] = checkpointing
        if plan.activation_offloading:
            train["activation_offloading"] = True
        layout = parallel if isinstance(parallel, str) else parallel.model_dump(mode="json", exclude_defaults=True)
        if isinstance(layout, dict) and "microbatches" in layout:
            del train["micro_batch_size"]
        return {"parallel": layout, "train": train}

    def to_dict(self) -> dict[str, Any]:
        """The candidate as in the output of `--json`; None for what is unknown: all that depends on the time."""
        plan = self.plan
        return {
            "strategy": plan.strategy,
            "parallel": plan.degrees(),
            "schedule": plan.schedule,
            "stages": list(plan.stages),
            **{name: getattr(plan, name) for name in _PLAN_FIELDS},
            "machines": self.machines or None,
            "num_devices": self.cluster.num_devices,
            "fits": self.fits,
            "memory_bytes": self.memory.total,
            "usable_bytes": None if self.usable_bytes is None else int(self.usable_bytes),
            **dict.fromkeys(_TIMED),
            "recipe": self.settings(),
        }


@dataclass(frozen=True, kw_only=True)
class RankedPlan(SizedPlan):
    """The same with what it takes.

    Attributes:
        goodput: with failures and slow machines; None if nothing is said about them.
    """

    forecast: Forecast
    goodput: Goodput | None = None

    def of_all_time(self, value: float) -> float:
        """A time or a cost of steps alone, with what failures and slow machines add; infinite if nothing trains."""
        share = 1.0 if self.goodput is None else self.goodput.share
        return value / share if share else math.inf

    @override
    def to_dict(self) -> dict[str, Any]:
        forecast = self.forecast
        return super().to_dict() | {
            "step_seconds": forecast.step.total,
            "seconds": forecast.step.to_dict(),
            "goodput": None if self.goodput is None else self.goodput.share,
            "correction": forecast.correction.factor,
            "limited_by": forecast.step.limit,
            **{name: getattr(forecast, name) for name in _FORECAST},
        }


def search_plans(
    recipe: "Recipe",
    shape: ModelShape,
    cluster: Cluster,
    by: Goal = "time",
    price: HourlyPrice | None = None,
    machines: str = "",
    divide: bool = True,
    history: History = NO_HISTORY,
) -> tuple[RankedPlan, ...]:
    """The candidates that fit in memory, best first, then the smallest of the others, so that there are at least ten.

    `divide`: also divide layers among stages, and long sequences. `history`: measured runs of this model on these
    devices, which correct the time of each candidate before they are ranked. Raises PlanError or ConfigError, that of
    the first variant, if no plan is possible on these devices, and PlanError if their speed is unknown.
    """
    usable = find_usable_bytes(cluster)
    fitting: dict[tuple[ParallelPlan, bool], RankedPlan] = {}
    others: list[_Found] = []
    refused: list[ConfigError | PlanError] = []

    def rank(found: _Found) -> RankedPlan:
        forecast = forecast_run(found.variant, shape, found.plan, cluster, price, history=history)
        layout = found.variant.parallel
        return RankedPlan(
            plan=found.plan, cluster=cluster, memory=found.needs, machines=machines, parallel=layout, forecast=forecast
        )

    for variant, first in _resolve_layouts(recipe, shape, cluster, divide, refused):
        for candidate in _list_found(variant, first, shape, cluster, usable, by):
            if not candidate.needs.fits(usable, cluster):
                others.append(candidate)
            elif (key := _identify(candidate.plan)) not in fitting:
                fitting[key] = rank(candidate)
    if not (fitting or others):
        raise refused[0]
    others.sort(key=lambda other: other.needs.total)
    more = [rank(other) for other in others[: max(0, SHOWN - len(fitting))]]
    return rank_plans([*fitting.values(), *more], by)


@dataclass(frozen=True)
class _Found:
    """A plan, the recipe that it is of, and what it needs."""

    variant: "Recipe"
    plan: ParallelPlan
    needs: MemoryEstimate


def _resolve_layouts(
    recipe: "Recipe", shape: ModelShape, cluster: Cluster, divide: bool, refused: list[ConfigError | PlanError]
) -> Iterator[tuple["Recipe", ParallelPlan]]:
    """Each recipe that sets what this one leaves to echelon, with its plan; the errors of the others are added."""
    # Without a limit, resolve_plan refuses no plan for its memory: those that do not fit are answered as well.
    unlimited = replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=None), host_memory_bytes=None)
    for parallel in list_layouts(recipe, shape, cluster, divide):
        variant = recipe.model_copy(update={"parallel": parallel})
        try:
            yield variant, resolve_plan(variant, shape, unlimited)
        except (ConfigError, PlanError) as error:
            refused.append(error)


def _list_found(
    variant: "Recipe", first: ParallelPlan, shape: ModelShape, cluster: Cluster, usable: float | None, by: Goal
) -> Iterator[_Found]:
    """The plans of one layout; of ways to keep activations that differ in time and memory alone, the best that fits."""

    def measure(candidate: ParallelPlan) -> _Found:
        plan = add_rollout(candidate, variant, shape, cluster.kind, usable)
        return _Found(variant, plan, estimate_memory(shape, plan, cluster.kind))

    memory = cluster.accelerator.memory_bytes
    for plan in list_micro_batches(variant, first, cluster.kind)[::-1]:
        tried: list[_Found] = []
        fitting: list[_Found] = []
        for policies in list_policies(variant, plan, cluster.kind)[:: -1 if by == "memory" else 1]:
            measured = [measure(policy) for policy in policies]
            tried += measured
            fitting += [candidate for candidate in measured if candidate.needs.fits(usable, cluster)]
            is_enough = any(by == "memory" or not candidate.plan.activation_offloading for candidate in fitting)
            if is_enough or (memory is not None and measured[0].needs.states > memory):
                break
        yield from fitting
        if not fitting:
            yield min(tried, key=lambda candidate: candidate.needs.total)
            return  # larger micro batches do not fit either


def take_plan(
    recipe: "Recipe",
    shape: ModelShape,
    cluster: Cluster,
    price: HourlyPrice | None = None,
    machines: str = "",
    history: History = NO_HISTORY,
) -> RankedPlan:
    """The plan that the recipe has on these devices without a search, as `resolve_plan` gives it.

    Raises PlanError or ConfigError if it has none, and PlanError if the speed of the devices is unknown.
    """
    plan = resolve_plan(recipe, shape, cluster)
    return RankedPlan(
        plan=plan,
        cluster=cluster,
        memory=estimate_memory(shape, plan, cluster.kind),
        machines=machines,
        parallel=_find_parallel(recipe, shape, cluster, plan),
        forecast=forecast_run(recipe, shape, plan, cluster, price, history=history),
    )


def _find_parallel(recipe: "Recipe", shape: ModelShape, cluster: Cluster, plan: ParallelPlan) -> str | ParallelConfig:
    """The value of `parallel` that gives a plan of this recipe: its own, or what `auto` has taken."""
    if recipe.parallel != "auto" or plan.strategy in STRATEGIES:
        return plan.strategy if recipe.parallel == "auto" else recipe.parallel
    train = recipe.train.model_copy(update={"micro_batch_size": plan.micro_batch_size})
    for parallel in list_divided(recipe, shape, cluster):
        if any(getattr(parallel, axis) != degree for axis, degree in plan.degrees().items()):
            continue
        with suppress(ConfigError, PlanError):
            resolved = resolve_plan(recipe.model_copy(update={"parallel": parallel, "train": train}), shape, cluster)
            if replace(resolved, why=plan.why) == plan:
                return parallel
    raise AssertionError(f"no mapping that auto weighs gives {plan.name_degrees()}")


def _identify(plan: ParallelPlan) -> tuple[ParallelPlan, bool]:
    """The plan without its name: with one microbatch ZeRO-1 and ZeRO-2 are the same.

    On one device the name alone tells DDP from ZeRO-1, which casts the weights once a step.
    """
    when = "last" if plan.num_microbatches == 1 else plan.reduce_gradients
    return replace(plan, why=(), strategy="", reduce_gradients=when), plan.uses_fully_shard


def rank_plans(candidates: Sequence[RankedPlan], by: Goal) -> tuple[RankedPlan, ...]:
    """Candidates by what they take; those that do not fit come last, the smallest first."""
    return tuple(sorted(candidates, key=lambda candidate: _rank(candidate, by)))


def _rank(candidate: RankedPlan, by: Goal) -> tuple[bool, float, float]:
    seconds, memory = candidate.forecast.step.total, float(candidate.memory.total)
    if not candidate.fits:
        return True, memory, seconds
    if by == "memory":
        return False, memory, seconds
    cost = candidate.forecast.usd_per_billion_tokens
    if by == "cost" and cost is not None:
        return False, candidate.of_all_time(cost), seconds
    return False, candidate.of_all_time(seconds / candidate.forecast.tokens_per_step), memory


def forecast_float8(recipe: "Recipe", shape: ModelShape, best: RankedPlan) -> Forecast | None:
    """The forecast of a candidate whose products are in float8; None where the recipe or the devices rule it out.

    It is corrected as the candidate is.
    """
    plan = best.plan
    if recipe.train.precision != "auto" or not best.cluster.has_float8 or plan.divides_matrices or not plan.compile:
        return None
    if plan.adapter is not None or plan.precision.compute != "bfloat16":
        return None
    rounded = replace(plan, precision=replace(plan.precision, float8=True))
    forecast = forecast_run(recipe, shape, rounded, best.cluster, best.forecast.price)
    return replace(forecast, step=best.forecast.correction.apply(forecast.step), correction=best.forecast.correction)
