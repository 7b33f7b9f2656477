"""Quote a recipe on every instance type with a known price: hours and dollars with an error bar.

The error bar is how far predictions were off before. Without measured runs of a plan that is how far `echelon plan` was
off for published runs of other programs, of which `benchmarks/planner_accuracy.py` predicts 309. With several, it is
how far these differ from each other.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean
from typing import Any

from typing_extensions import override

from echelon.cli.api.recipes import RecipeLike, load_recipe
from echelon.cli.api.searching import render_numbered, search_instances
from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import render_duration
from echelon.ground.variables import QUOTE_VARIABLE, find_cache_dir
from echelon.planner.forecast import History, HourlyPrice, MeasuredRun, describe_plan, read_history, render_usd
from echelon.planner.hardware.instances import list_instances
from echelon.planner.hardware.price_files import find_price_folder
from echelon.planner.plan import ParallelPlan
from echelon.planner.reliability import RESTART_SECONDS
from echelon.planner.search import RankedPlan
from echelon.recipe.document import Recipe
from echelon.run.lifecycle.model_checks import check_model
from echelon.run.report.picture import draw_search

FEWEST_RUNS = 3
"""Measured runs with the degrees of a plan whose range replaces that of the published runs."""

PUBLISHED_LOW, PUBLISHED_HIGH = 0.82, 1.39
"""The 10th and the 90th percentile of measured over predicted seconds of a step, over the 309 published runs.

`benchmarks/planner_accuracy.py` prints them.
"""

_START_HOURS = RESTART_SECONDS / 3600
_SHOWN = 12
_HEADER = ("machines", "plan", "hours", "error bar", "cost", "error bar", "price of a machine")


@dataclass(frozen=True)
class ErrorBar:
    """The factors of the predicted time between which the true time is expected, and why."""

    low: float
    high: float
    reason: str


PUBLISHED = ErrorBar(
    PUBLISHED_LOW,
    PUBLISHED_HIGH,
    f"8 of 10 published runs took between {PUBLISHED_LOW:.2f} and {PUBLISHED_HIGH:.2f} times as long as predicted",
)


def find_error_bar(plan: ParallelPlan, history: History) -> ErrorBar:
    """How far the forecast of a plan may be off. `history`: the measured runs that have corrected it."""
    degrees = describe_plan(plan)["degrees"]
    like = [run for run in history.runs if run.plan["degrees"] == degrees]
    return PUBLISHED if len(like) < FEWEST_RUNS else _find_own(like)


def _find_own(runs: Sequence[MeasuredRun]) -> ErrorBar:
    factors = [run.factor for run in runs]
    middle = geometric_mean(factors)
    low, high = min(factors) / middle, max(factors) / middle
    words = (
        f"{len(runs)} measured runs of this model with these degrees, between {low:.2f} and {high:.2f} of their mean"
    )
    return ErrorBar(low, high, words)


@dataclass(frozen=True)
class Amount:
    """A predicted amount, and the ends of its error bar."""

    expected: float
    low: float
    high: float

    def times(self, factor: float) -> "Amount":
        """The amount and its ends, multiplied."""
        return Amount(factor * self.expected, factor * self.low, factor * self.high)


@dataclass(frozen=True)
class Quote:
    """What a run takes under a plan on machines of a known price: a start, and all steps.

    `is_spot`: the price is that of spot machines; what their interruptions cost is not part of the quote.
    """

    candidate: RankedPlan
    bar: ErrorBar
    is_spot: bool = False

    @property
    def machines(self) -> str:
        """Their number and type."""
        return self.candidate.machines + (" spot" if self.is_spot else "")

    @property
    def hours(self) -> Amount:
        """The error bar is that of the steps; a start is assumed to take 300 s."""
        steps = self.candidate.forecast.hours
        assert steps is not None
        return Amount(*(_START_HOURS + factor * steps for factor in (1.0, self.bar.low, self.bar.high)))

    @property
    def usd(self) -> Amount:
        """The hours, at the price of all machines."""
        hourly = self.candidate.forecast.usd_per_hour
        assert hourly is not None
        return self.hours.times(hourly)


def order_quotes(quotes: Sequence[Quote]) -> tuple[list[Quote], list[Quote]]:
    """Those than which no other is both cheaper and faster, from the cheapest to the fastest; then the others by cost.

    Of two that cost and take the same, the first stays.
    """
    best: list[Quote] = []
    others: list[Quote] = []
    for quote in sorted(quotes, key=lambda quote: (quote.usd.expected, quote.hours.expected)):
        is_faster = not best or quote.hours.expected < best[-1].hours.expected
        (best if is_faster else others).append(quote)
    return best, others


@dataclass(frozen=True)
class QuoteReport:
    """The quotes of a recipe. `str()` gives the table.

    Attributes:
        best: no other is both cheaper and faster; from the cheapest to the fastest.
        others: the rest, by cost.
        unpriced: instance types with GPUs that are not quoted, because their price is unknown.
    """

    recipe: Recipe
    best: tuple[Quote, ...]
    others: tuple[Quote, ...]
    unpriced: tuple[str, ...]

    @property
    def quotes(self) -> tuple[Quote, ...]:
        """All, in the order of their numbers, from 1."""
        return (*self.best, *self.others)

    def accepted(self, number: int) -> list[str]:
        """The overrides of a recipe that launch a quote: machines, plan, and the end of its error bar as the budget.

        A budget of the recipe stays if it is smaller. Raises ConfigError if there is no quote of this number.
        """
        if not 1 <= number <= len(self.quotes):
            raise ConfigError(f"--accept {number}: the quotes have the numbers 1 to {len(self.quotes)}.")
        quote = self.quotes[number - 1]
        count, _, name = quote.candidate.machines.partition(" x ")
        price = quote.candidate.forecast.price
        assert price is not None
        if not name.startswith("ml."):
            raise ConfigError(
                f"--accept {number}: {name} is a machine of a file of prices, which echelon cannot rent; launch "
                "the recipe there with --to skypilot, or by its own scheduler."
            )
        limits = [limit for limit in (self.recipe.budget.max_usd, quote.usd.high) if limit is not None]
        settings = quote.candidate.settings()
        values = {
            "launch.to": "sagemaker",
            "launch.sagemaker.instance_type": name,
            "launch.nodes": int(count),
            "parallel": settings["parallel"],
            **{f"train.{key}": value for key, value in settings["train"].items()},
            f"budget.{'spot_' if quote.is_spot else ''}usd_per_hour": price.usd_per_hour,
            "budget.max_usd": round(min(limits), 2),
            f"launch.env.{QUOTE_VARIABLE}": json.dumps(_plain(quote)),
        }
        if self.recipe.launch.max_hours is None:  # SageMaker ends a job after 24 h otherwise
            values["launch.max_hours"] = max(24, math.ceil(quote.hours.high) + 1)
        if quote.is_spot and self.recipe.launch.sagemaker.spot is None:
            hours = self.recipe.launch.max_hours or values["launch.max_hours"]
            values["launch.sagemaker.spot"] = {"max_wait_hours": 2 * hours}
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]

    def to_dict(self) -> dict[str, Any]:
        """The output of `--json`."""
        return {
            "quotes": [
                {
                    "number": number,
                    "machines": quote.candidate.machines,
                    "spot": quote.is_spot,
                    "plan": quote.candidate.name(),
                    **_plain(quote),
                    "error_bar": quote.bar.reason,
                    "is_best": number <= len(self.best),
                    "tokens_per_second": quote.candidate.forecast.tokens_per_second,
                    "recipe": quote.candidate.settings(),
                }
                for number, quote in enumerate(self.quotes, 1)
            ],
            "unpriced": list(self.unpriced),
        }

    def draw(self) -> str:
        """The picture as SVG: hours against dollars."""
        return draw_search([quote.candidate for quote in self.quotes])

    @override
    def __str__(self) -> str:
        return "\n".join(self.describe())

    def describe(self) -> Iterator[str]:
        """The table, what the error bars are, and what is missing."""
        shown = [*self.best, *self.others[: max(0, _SHOWN - len(self.best))]]
        yield f"{len(self.quotes)} quotes; {_describe_best(len(self.best))}"
        yield from render_numbered(_HEADER, [_row(quote) for quote in shown])
        left = len(self.quotes) - len(shown)
        if left:
            yield f"  and {left} more that cost more (--json has all)"
        yield from _say_once("error bar", [(quote.bar.reason, number) for number, quote in enumerate(shown, 1)])
        terms = {price.terms for quote in self.quotes if (price := quote.candidate.forecast.price) is not None}
        if len(terms) > 1:
            yield (
                f"  prices: of {len(terms)} regions and dates, compared as they are, so with those of one region the "
                "order may be another; echelon plan --prices refresh looks up those of launch.sagemaker.region"
            )
        yield "  with 5 min for a start; without evaluation, checkpoints, waiting for machines, storage and traffic"
        if self.unpriced:
            yield (
                f"  no price known, so not compared: {', '.join(self.unpriced)}; echelon plan --prices refresh looks "
                f"prices up, or write one into a file in {find_price_folder()} (docs/cost.md)"
            )
        if any(quote.is_spot for quote in self.quotes):
            yield "  spot: without what interruptions cost; SageMaker's discount may differ from EC2's market"
        else:
            yield "  spot machines cost less; echelon plan --prices spot looks their prices up"


def quote(recipe: RecipeLike, count: int | None = None) -> QuoteReport:
    """Quote a recipe on every SageMaker instance type with a GPU and a known price. Downloads no weights.

    The plan on each is the one that `plan` has there; if that does not fit, the cheapest that a search finds.

    Args:
        recipe: a Recipe, the path of its file, or a mapping. What it sets is kept by every plan.
        count: the number of machines; None: 1, 2, 4 and 8 of each type.

    Raises:
        ConfigError, PlanError or DataError: no plan fits, or the number of steps depends on data that is not prepared.
    """
    recipe = load_recipe(recipe)
    shape = check_model(recipe, elsewhere=True).shape
    found = search_instances(recipe, shape, "cost", count, own_first=True)
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        raise PlanError(
            "no plan of this recipe fits the memory of an instance type with a known price; `echelon plan RECIPE "
            "--instance auto --by memory` shows the smallest ones."
        )
    if fitting[0].forecast.hours is None:
        raise ConfigError(
            "the number of steps depends on data that is not prepared, so hours cannot be quoted; set train.steps or "
            "train.tokens."
        )
    types = list_instances(recipe.launch.sagemaker.region)
    quotes: list[Quote] = []
    for candidate in fitting:
        bar = find_error_bar(candidate.plan, read_history(find_cache_dir(), shape, candidate.cluster))
        quotes.append(Quote(candidate, bar))
        if (spot := types[candidate.machines.partition(" x ")[2]].spot) is not None:
            price = HourlyPrice(spot.usd_per_hour, f"spot, {spot.terms}")
            forecast = replace(candidate.forecast, price=price)
            quotes.append(Quote(replace(candidate, forecast=forecast), bar, is_spot=True))
    unpriced = tuple(instance.name for instance in types.values() if instance.gpus and instance.price is None)
    best, others = order_quotes(quotes)
    return QuoteReport(recipe, tuple(best), tuple(others), unpriced)


def _plain(quote: Quote) -> dict[str, float]:
    """Hours and dollars with the ends of their error bars, as in estimate.json."""
    return {
        name if end == "expected" else f"{end}_{name}": round(value, 4)
        for name, amount in (("hours", quote.hours), ("usd", quote.usd))
        for end, value in asdict(amount).items()
    }


def _row(quote: Quote) -> tuple[str, ...]:
    hours, usd, price = quote.hours, quote.usd, quote.candidate.forecast.price
    return (
        quote.machines,
        quote.candidate.name(),
        _render_hours(hours.expected),
        f"{_render_hours(hours.low)} to {_render_hours(hours.high)}",
        render_usd(usd.expected),
        f"{render_usd(usd.low)} to {render_usd(usd.high)}",
        "" if price is None else f"${price.usd_per_hour:g}/h ({price.terms})",
    )


def _describe_best(count: int) -> str:
    """What the first quotes are."""
    if count == 1:
        return "1 is the cheapest and the fastest"
    return f"1 to {count} go from the cheapest to the fastest, and each of the others is beaten by one of them in both"


def _render_hours(hours: float) -> str:
    return render_duration(3600 * hours)


def _say_once(label: str, rows: Sequence[tuple[str, int]]) -> Iterator[str]:
    """A line for each different text, with the numbers it is about if there are several texts."""
    texts = list(dict.fromkeys(text for text, _ in rows))
    for text in texts:
        numbers = ", ".join(str(number) for text_of, number in rows if text_of == text)
        yield f"  {label}: {text}" + (f" ({numbers})" if len(texts) > 1 else "")
