"""Search the plans of a recipe, on given devices or over instance types, and rank them by time, cost or memory."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Option
from typing_extensions import override

from echelon.cli.api.planning import find_target, plan
from echelon.cli.api.recipes import RecipeLike, load_recipe
from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import render_bytes, render_duration
from echelon.ground.variables import find_cache_dir
from echelon.planner.forecast import Forecast, HourlyPrice, read_history
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.instances import list_instances
from echelon.planner.machines import find_cluster
from echelon.planner.model_shape import ModelShape
from echelon.planner.reliability import Goodput, Reliability, estimate_goodput
from echelon.planner.search import (
    SHOWN,
    Goal,
    RankedPlan,
    SizedPlan,
    forecast_float8,
    rank_plans,
    search_plans,
    take_plan,
)
from echelon.planner.time import name_part
from echelon.recipe.document import Recipe
from echelon.run.lifecycle.model_checks import check_model
from echelon.run.report.picture import draw_search

# Machines of each type that are tried, if their number is not given.
_COUNTS = (1, 2, 4, 8)
# Fewer machines are preferred to this share of the goal: links inside a machine are faster than estimates are exact.
_CLOSE = 0.05
_DIVIDED = 4  # clusters of all instance types on which pp and cp are tried
_VISIBLE = 0.001  # of a step: smaller differences are not named


@dataclass(frozen=True)
class SearchReport:
    """Ranked candidates, best first. `str()` gives the table."""

    candidates: tuple[RankedPlan, ...]
    by: Goal
    budget_usd: float | None = None
    deadline_hours: float | None = None
    float8: Forecast | None = None
    """Of the first candidate with its products in float8, where `train.precision` and the devices allow it."""

    reliability: Reliability | None = None

    @property
    def goodput(self) -> Goodput | None:
        """Of the first candidate, with the failures and stragglers of `reliability`."""
        return self.shown[0].goodput

    @property
    def shown(self) -> tuple[RankedPlan, ...]:
        """Those that are allowed; all, if none is."""
        return self.allowed or self.candidates

    @property
    def allowed(self) -> tuple[RankedPlan, ...]:
        """Those that fit in memory, the budget and the deadline."""
        return tuple(candidate for candidate in self.candidates if candidate.fits and self._is_within(candidate))

    def _is_within(self, candidate: RankedPlan) -> bool:
        limits = ((self.budget_usd, candidate.forecast.usd), (self.deadline_hours, candidate.forecast.hours))
        return all(
            limit is None or (value is not None and candidate.of_all_time(value) <= limit) for limit, value in limits
        )

    def to_dict(self) -> dict[str, Any]:
        """The output of `--json`."""
        return {
            "by": self.by,
            "candidates": [candidate.to_dict() for candidate in self.shown],
            "float8_step_seconds": None if self.float8 is None else self.float8.step.total,
            "goodput": None if self.goodput is None else self.goodput.share,
            "untimed": None,
        }

    def draw(self) -> str:
        """The picture as SVG."""
        return draw_search(self.allowed)

    @override
    def __str__(self) -> str:
        return "\n".join(self.describe())

    def describe(self) -> Iterator[str]:
        """The table, and why the best one beats the next."""
        allowed, fitting = self.allowed, [candidate for candidate in self.candidates if candidate.fits]
        limits = [] if self.budget_usd is None else [f"${self.budget_usd:g}"]
        limits += [] if self.deadline_hours is None else [f"{self.deadline_hours:g} h"]
        within = f", {len(allowed)} of them within {' and '.join(limits)}" if limits else ""
        yield f"search by {self.by}: {len(fitting)} plans fit in memory{within}"
        if not fitting:
            yield "no plan fits in memory; the smallest ones:"
        elif not allowed:
            yield "no plan is within the limits; the best ones without them:"
        shown = self.shown[:SHOWN]
        yield from _render_table(shown)
        yield from _describe_prices(shown)
        first = shown[0].forecast
        for assumption in first.step.assumptions:
            if assumption != first.correction.reason:
                yield f"  assumes: {assumption}"
        yield from _describe_corrections(shown)
        if len(shown) > 1 and shown[0].fits:
            yield _explain(*shown[:2])
            yield from _explain_machines(shown[0], allowed)
        yield f"recipe of 1: {_render_settings(shown[0])}"
        if self.goodput is not None and self.reliability is not None:
            yield from self.goodput.describe(self.reliability)
        yield from _describe_float8(shown[0], self.float8)


@dataclass(frozen=True)
class UntimedReport:
    """The plan for devices of unknown speed, which no search can rank. `reason`: why, and what to do."""

    candidate: SizedPlan
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The output of `--json`, as of a search with one candidate, whose times are None."""
        unknown = dict.fromkeys(("by", "float8_step_seconds", "goodput"))
        return unknown | {"candidates": [self.candidate.to_dict()], "untimed": self.reason}


def plan_untimed(recipe: Recipe, asked: Mapping[str, Any], error: PlanError) -> UntimedReport:
    """Plan a recipe that cannot be searched, because of `error`; raises it if the speed of the devices is known."""
    planned = plan(recipe, **asked)
    if planned.forecast is not None:
        raise error
    instance = asked.get("instance")
    machines = "" if instance is None else f"{planned.cluster.num_nodes} x {instance}"
    sized = SizedPlan(plan=planned.plan, cluster=planned.cluster, memory=planned.memory, machines=machines)
    return UntimedReport(replace(sized, parallel=recipe.parallel), str(error))


def search(
    recipe: RecipeLike,
    devices: str | None = None,
    *,
    devices_per_node: int = 8,
    instance: str | None = None,
    count: int | None = None,
    by: Goal | None = None,
    budget_usd: Annotated[float | None, Option(min=0)] = None,
    deadline_hours: Annotated[float | None, Option(min=0)] = None,
    reliability: Reliability | None = None,
) -> SearchReport:
    """Search the plans that a recipe allows, and rank them, without `by` by time. Downloads no weights.

    Args:
        recipe: a Recipe, the path of its file, or a mapping. What it sets is kept by every candidate.
        devices: number and kind of the devices, for example `64xH100@nvlink,efa`; None: those of this machine.
        devices_per_node: devices per machine, with `devices`.
        instance: a SageMaker instance type instead; `auto`: all types with a GPU and a known price.
        count: the number of instances; None: 1, or with `auto` 1, 2, 4 and 8.
        by: search all plans that the recipe allows, and rank them by this.
        budget_usd: search plans whose run costs at most this.
        deadline_hours: search plans whose run takes at most this.
        reliability: failures and stragglers: plans are ranked, and compared with a budget and a deadline, by the time
            that they take with these. The table has their tokens per second, hours and dollars without them.

    Raises:
        ConfigError, PlanError or DataError: no plan is possible, or the speed or the price of the devices is unknown.
    """
    recipe = load_recipe(recipe)
    by = by or "time"
    shape = check_model(recipe, elsewhere=devices is not None or instance is not None).shape
    if instance == "auto" and devices is None:
        ranked = search_instances(recipe, shape, by, count, reliability)
    else:
        cluster, price = find_target(recipe, shape, devices, devices_per_node, instance, count)
        has_price = price is not None or recipe.budget.usd_per_hour is not None
        if not has_price and (by == "cost" or budget_usd is not None):
            raise ConfigError(
                "the price of these machines is unknown, so plans cannot be compared by cost; give --instance ml.TYPE, "
                "or set budget.usd_per_hour, the price of one machine."
            )
        machines = "" if instance is None else f"{cluster.num_nodes} x {instance}"
        history = read_history(find_cache_dir(), shape, cluster)
        ranked = search_plans(recipe, shape, cluster, by, price, machines, history=history)
        # the same for all, as are the machines
        ranked = tuple(_add_goodput(candidate, shape, reliability) for candidate in ranked)
    if ranked[0].forecast.hours is None and (budget_usd is not None or deadline_hours is not None):
        raise ConfigError(
            "the number of steps depends on data that is not prepared, so a budget or a deadline cannot be checked; "
            "set train.steps or train.tokens."
        )
    report = SearchReport(ranked, by, budget_usd, deadline_hours, reliability=reliability)
    return replace(report, float8=forecast_float8(recipe, shape, report.shown[0]))


def _add_goodput(candidate: RankedPlan, shape: ModelShape, reliability: Reliability | None) -> RankedPlan:
    if reliability is None:
        return candidate
    return replace(candidate, goodput=estimate_goodput(shape, candidate.plan, candidate.cluster.num_nodes, reliability))


def search_instances(
    recipe: Recipe,
    shape: ModelShape,
    by: Goal,
    count: int | None,
    reliability: Reliability | None = None,
    own_first: bool = False,
) -> tuple[RankedPlan, ...]:
    """The best plan on each type and number of machines, at the price of each type in the catalogue.

    Plans with `pp` and `cp` are tried on the few best of those machines where they could come first: they take most of
    the time of a search. `own_first`: machines are searched only where the plan that the recipe has there without a
    search does not fit.
    """
    no_price = {"usd_per_hour": None, "spot_usd_per_hour": None}  # of one type
    recipe = recipe.model_copy(update={"budget": recipe.budget.model_copy(update=no_price)})

    def find_best(cluster: Cluster, price: HourlyPrice | None, name: str, divide: bool) -> RankedPlan:
        history = read_history(find_cache_dir(), shape, cluster)
        if own_first:
            with suppress(ConfigError, PlanError):
                taken = take_plan(recipe, shape, cluster, price, name, history)
                if taken.fits:
                    return taken
        ranked = search_plans(recipe, shape, cluster, by, price, name, divide, history)
        return _add_goodput(ranked[0], shape, reliability)

    best: list[RankedPlan] = []
    reason: ConfigError | PlanError | None = None
    for instance in list_instances(recipe.launch.sagemaker.region).values():
        if not instance.gpus or instance.price is None:
            continue
        price = HourlyPrice(instance.price.usd_per_hour, instance.price.terms)
        for machines in _COUNTS if count is None else (count,):
            try:
                cluster = find_cluster(recipe, instance, machines)
                best.append(find_best(cluster, price, f"{machines} x {instance.name}", divide=False))
            except (ConfigError, PlanError) as error:
                reason = error
    if not best:
        raise reason or PlanError("no instance type has a GPU and a known price.")
    best = list(rank_plans(best, by))
    first, tried = best[0], 0
    for index, candidate in enumerate(best):
        if tried < _DIVIDED and _could_be_first(candidate, first, by):
            tried += 1
            best[index] = find_best(candidate.cluster, candidate.forecast.price, candidate.machines, divide=True)
            first = rank_plans([first, best[index]], by)[0]
    return prefer_fewer_machines(rank_plans(best, by), by)


def _could_be_first(candidate: RankedPlan, first: RankedPlan, by: Goal) -> bool:
    """Whether another layout on these machines could be better than the first plan: none computes less than `each`."""
    if by == "memory" or not first.fits:
        return True
    step = candidate.forecast.step
    return candidate.fits and _value(candidate, by) * (step.matmul + step.attention) / step.total < _value(first, by)


def prefer_fewer_machines(ranked: Sequence[RankedPlan], by: Goal) -> tuple[RankedPlan, ...]:
    """Put the candidate with the fewest machines first among those that are nearly as good as the best one."""
    first = ranked[0]
    if by == "memory" or not first.fits:
        return tuple(ranked)
    close = [
        candidate
        for candidate in ranked
        if candidate.fits and _value(candidate, by) <= (1 + _CLOSE) * _value(first, by)
    ]
    fewest = min(close, key=lambda candidate: candidate.cluster.num_nodes)
    return (fewest, *(candidate for candidate in ranked if candidate is not fewest))


def _value(candidate: RankedPlan, by: Goal) -> float:
    cost = candidate.forecast.usd_per_billion_tokens
    return candidate.of_all_time(
        cost if by == "cost" and cost is not None else 1 / candidate.forecast.tokens_per_second
    )


def _render_table(shown: Sequence[RankedPlan]) -> Iterator[str]:
    header: tuple[str, ...] = ("plan", "micro batch", "checkpointing", "tokens/s", "memory", "time", "$", "limited by")
    header += () if shown[0].goodput is None else ("goodput",)
    yield from render_numbered(header, [_row(candidate) for candidate in shown])


def render_numbered(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table whose rows have numbers, from 1."""
    rows = [header, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for number, row in enumerate(rows):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {number or '':>2}  {cells}".rstrip()


def _row(candidate: RankedPlan) -> tuple[str, ...]:
    forecast, plan = candidate.forecast, candidate.plan
    where = f"{candidate.machines}, " if candidate.machines else ""
    limit = ""
    if candidate.usable_bytes is not None:
        limit = f" of {render_bytes(candidate.usable_bytes)}"
        limit += f" ({1 - candidate.memory.total / candidate.usable_bytes:.0%} free)" if candidate.fits else ""
    return (
        f"{where}{candidate.name()}",
        str(plan.micro_batch_size),
        candidate.activations,
        f"{forecast.tokens_per_second:,.0f}",
        f"{render_bytes(candidate.memory.total)}{limit}" + ("" if candidate.fits else ", does not fit"),
        "?" if forecast.hours is None else render_duration(3600 * forecast.hours),
        "?" if forecast.usd is None else f"{forecast.usd:,.2f}",
        forecast.step.limit,
        *(() if candidate.goodput is None else (f"{candidate.goodput.share:.1%}",)),
    )


def _describe_prices(shown: Sequence[RankedPlan]) -> Iterator[str]:
    """Region and date of the prices of instance types, once; with several, the candidates of each."""
    places: dict[str, list[int]] = {}
    for number, candidate in enumerate(shown, 1):
        if candidate.machines and candidate.forecast.price is not None:
            places.setdefault(candidate.forecast.price.terms, []).append(number)
    if len(places) == 1:
        yield f"  prices on demand: {next(iter(places))}"
    elif places:
        parts = (f"{terms} of {', '.join(map(str, numbers))}" for terms, numbers in places.items())
        yield f"  prices on demand: {'; '.join(parts)}; they differ between regions, so yours may rank otherwise"


def _describe_corrections(shown: Sequence[RankedPlan]) -> Iterator[str]:
    """Which candidates were corrected, by which measured runs; nothing if none was."""
    places: dict[str, list[int]] = {}
    for number, candidate in enumerate(shown, 1):
        places.setdefault(candidate.forecast.correction.reason, []).append(number)
    if set(places) == {""}:
        return
    for reason, corrected in places.items():
        words = reason or "not corrected: no run of this model on such devices was measured"
        yield f"  {', '.join(map(str, corrected))}: {words}"


def _explain(best: RankedPlan, second: RankedPlan) -> str:
    """Why the first candidate is better than the second: the parts of a step that differ most, and the cost."""
    ours, theirs = best.forecast, second.forecast
    faster = theirs.step.total / theirs.tokens_per_step * ours.tokens_per_step / ours.step.total - 1
    mine, other = ours.step.to_dict(), theirs.step.to_dict()
    gains = sorted(((other[name] - mine[name], name) for name in mine), key=lambda gain: -abs(gain[0]))[:2]
    parts = ", ".join(
        f"{name_part(name)} {abs(seconds):.3g} s {'less' if seconds > 0 else 'more'}" for seconds, name in gains
    )
    words = f"{abs(faster):.1%} {'faster' if faster >= 0 else 'slower'} ({parts} per step)"
    if ours.usd_per_billion_tokens is not None and theirs.usd_per_billion_tokens is not None:
        saved = 1 - ours.usd_per_billion_tokens / theirs.usd_per_billion_tokens
        words += f", {abs(saved):.1%} {'cheaper' if saved >= 0 else 'dearer'}"
    if best.goodput is not None and second.goodput is not None:
        words += f", {best.goodput.share:.1%} instead of {second.goodput.share:.1%} of the time is training"
    machines = best.cluster.num_nodes, second.cluster.num_nodes
    if machines[0] < machines[1]:
        words += f", on {machines[0]} machine{'' if machines[0] == 1 else 's'} instead of {machines[1]}"
    return f"why 1 and not 2: {words}; {render_bytes(best.memory.total)} instead of {render_bytes(second.memory.total)}"


def _explain_machines(best: RankedPlan, allowed: Sequence[RankedPlan]) -> Iterator[str]:
    """If the best candidate has more machines than another one: the numbers that speak for them."""
    fewer = [candidate for candidate in allowed if candidate.cluster.num_nodes < best.cluster.num_nodes]
    if not fewer:
        return
    one = min(fewer, key=lambda candidate: (candidate.cluster.num_nodes, candidate.forecast.step.total))
    ours, theirs = best.forecast, one.forecast
    words = [f"{ours.tokens_per_second:,.0f} tokens/s instead of {theirs.tokens_per_second:,.0f}"]
    if ours.usd_per_billion_tokens is not None and theirs.usd_per_billion_tokens is not None:
        words.append(
            f"${ours.usd_per_billion_tokens:,.2f} for a billion tokens instead of ${theirs.usd_per_billion_tokens:,.2f}"
        )
    few = one.machines or f"{one.cluster.num_nodes} x {one.cluster.devices_per_node} {one.cluster.accelerator.name}"
    yield f"why {best.cluster.num_nodes} machines, where {few} would do: {' and '.join(words)}"


def _render_settings(candidate: RankedPlan) -> str:
    """The settings of a candidate as overrides of a command."""
    settings = candidate.settings()
    train = (f"train.{name}={_render_value(value)}" for name, value in settings["train"].items())
    return " ".join((shlex.quote(f"parallel={_render_value(settings['parallel'])}"), *map(shlex.quote, train)))


def _render_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_render_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_render_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe_float8(best: RankedPlan, float8: Forecast | None) -> Iterator[str]:
    if float8 is None:
        return
    saved = 1 - float8.step.total / best.forecast.step.total
    if saved > 0:
        yield (
            f"train.precision=fp8 would make a step of 1 {saved:.1%} shorter; it rounds the inputs of matrix products "
            "to 8 bits, so the search does not choose it"
        )
