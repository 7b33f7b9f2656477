"""Pictures of plans, as SVG: time against cost of a search, and throughput over the number of devices."""

from collections.abc import Callable, Sequence

from echelon.ground.errors import ConfigError
from echelon.planner.more_devices import Scaling, ScalingPoint
from echelon.planner.search import RankedPlan
from echelon.run.report.blocks import Point, Series
from echelon.run.report.picture import Chart, ChartAxis, draw_picture

_Value = Callable[[Scaling, ScalingPoint], float]


def draw_search(candidates: Sequence[RankedPlan]) -> str:
    """The candidates of a search: hours against dollars, or against memory where all are on the same machines.

    On the same machines dollars are in proportion to hours. The line joins those that no other one beats in both.
    Raises ConfigError without a candidate.
    """
    if not candidates:
        raise ConfigError("--plot: no plan fits, so there is nothing to draw.")
    is_run = all(candidate.forecast.hours is not None for candidate in candidates)
    hours = "hours of the run" if is_run else "hours for a billion tokens"
    has_cost = len({candidate.machines for candidate in candidates}) > 1
    what = "dollars" if is_run else "dollars for a billion tokens"
    points = [
        (_hours(candidate, is_run), _dollars(candidate, is_run) if has_cost else candidate.memory.total)
        for candidate in candidates
    ]
    best = find_frontier(points)
    names = dict(zip(points, candidates, strict=True))
    labels = [(*point, names[point].machines if has_cost else names[point].name()) for point in best]
    chart = Chart(
        f"{hours} against {what if has_cost else 'memory of a device'}: {len(candidates)} plans",
        ChartAxis(hours, is_log=True),
        ChartAxis(what if has_cost else "bytes of a device", "number" if has_cost else "bytes", is_log=has_cost),
        [Series("plans", points, is_marked=True), Series("the best ones", best, is_faint=True)],
        joined=False,
        labels=labels[:6],
    )
    return draw_picture([chart])


def _hours(candidate: RankedPlan, is_run: bool) -> float:
    hours = candidate.forecast.hours if is_run else 1e9 / candidate.forecast.tokens_per_second / 3600
    assert hours is not None
    return hours


def _dollars(candidate: RankedPlan, is_run: bool) -> float:
    usd = candidate.forecast.usd if is_run else candidate.forecast.usd_per_billion_tokens
    assert usd is not None
    return usd


def find_frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one is at or below in both values, the first value rising."""
    frontier: list[Point] = []
    for point in sorted(set(points)):
        if not frontier or point[1] < frontier[-1][1]:
            frontier.append(point)
    return frontier


def draw_scaling(scalings: Sequence[Scaling]) -> str:
    """Speed-up over the devices, the exposed communication, and the bytes that a rank sends in a step."""
    known = [one.known for one in scalings]
    counts = sorted({point.num_devices for points in known for point in points})
    devices = ChartAxis("devices", is_log=True, ticks=counts)

    def lines(value: _Value) -> list[Series]:
        return [Series(f"{kind[0].kind} scaling", [(point.num_devices, value(scaling, point)) for point in kind], True)
                for scaling, kind in zip(scalings, known, strict=True)]  # fmt: skip

    first, last = known[0][0].num_devices, known[0][-1].num_devices
    ideal = Series("in proportion to the devices", [(first, 1.0), (last, last / first)], is_faint=True)
    pays = [
        (end.num_devices, scaling.speedup(end), f"{end.kind}: more no longer pay")
        for scaling in scalings
        if (end := scaling.last_that_pays()) is not None
    ]
    return draw_picture(
        [
            Chart("Speed-up in tokens per second", devices, ChartAxis("times the first", is_log=True),
                  [*lines(lambda scaling, point: scaling.speedup(point)), ideal], labels=pays),
            Chart("Communication beside which nothing is computed", devices, ChartAxis("part of a step", "percent"),
                  lines(lambda _, point: point.exposed_share)),
            Chart("Bytes that a rank sends in a step", devices, ChartAxis("bytes", "bytes"),
                  lines(lambda _, point: point.sent_bytes)),
        ]
    )  # fmt: skip
