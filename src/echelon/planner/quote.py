"""A quote: the hours and dollars of a run with an error bar, from how far predictions were off before.

Without measured runs of a plan that is how far `echelon plan` was off for published runs of other programs, of which
`benchmarks/planner_accuracy.py` predicts 309. With several, it is how far these differ from each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from echelon.planner.forecast import History, MeasuredRun, describe_plan
from echelon.planner.plan import ParallelPlan
from echelon.planner.reliability import RESTART_SECONDS
from echelon.planner.search import RankedPlan

FEWEST_RUNS = 3
"""Measured runs with the degrees of a plan whose range replaces that of the published runs."""

PUBLISHED_LOW, PUBLISHED_HIGH = 0.84, 1.39
"""The 10th and the 90th percentile of measured over predicted seconds of a step, over the 309 published runs.

`benchmarks/planner_accuracy.py` prints them.
"""

_START_HOURS = RESTART_SECONDS / 3600


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
