"""Pictures as SVG files of their own, which browsers and Markdown pages show: lines and points over two axes;
and those of plans: time against cost of a search, and throughput over the number of devices.

The pictures inside a report have their text in HTML (`page.py`); a file has it in the picture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.planner.more_devices import Scaling, ScalingPoint
from echelon.planner.search import RankedPlan
from echelon.run.report.blocks import Form, Point, Series, pick_ticks, render_axis
from echelon.run.report.page import render_template

_WIDTH, _HEIGHT = 640, 340  # of one chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 44, 46
_LEGEND = 20  # a line of the legend
_STYLE = Path(__file__).with_name("page.css")
_NUM_COLOURS = 8

_Value = Callable[[Scaling, ScalingPoint], float]


@dataclass(frozen=True)
class ChartAxis:
    """One axis of a chart.

    form: how its values are written. is_log: equal distances are equal ratios. ticks: the values that are written; by
    default about five round ones.
    """

    name: str
    form: Form = "number"
    is_log: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """Lines over two axes; a series with `is_marked` has points, one with `is_faint` is a thin line without them.

    joined: whether lines join the points of a marked series. labels: texts beside points.
    """

    title: str
    x: ChartAxis
    y: ChartAxis
    series: Sequence[Series]
    joined: bool = True
    labels: Sequence[tuple[float, float, str]] = ()


def draw_picture(charts: Sequence[Chart]) -> str:
    """Return an SVG document with the charts below each other. A chart has at least one point."""
    drawn: list[dict[str, Any]] = []
    top = 0
    for chart in charts:
        drawn.append(_plot_chart(chart, top))
        top += _HEIGHT + len(drawn[-1]["legend"]) * _LEGEND + (8 if drawn[-1]["legend"] else 0)
    style = _STYLE.read_text(encoding="utf-8")
    colours = style[style.index(":root") : style.index("* {")].strip()
    size = {"width": _WIDTH, "height": top, "left": _LEFT, "right": _WIDTH - _RIGHT}
    return render_template("picture.svg.jinja", charts=drawn, colours=colours, **size)


def _plot_chart(chart: Chart, top: int) -> dict[str, Any]:
    """Return the places of a chart's parts in the picture, `top` down from its upper end."""
    points = [point for series in chart.series for point in series.points]
    bottom = top + _HEIGHT - _BOTTOM
    across = _build_scale([x for x, _ in points], chart.x, _LEFT, _WIDTH - _RIGHT)
    upward = _build_scale([y for _, y in points], chart.y, bottom, top + _TOP)
    return {
        "title": chart.title,
        "top": top,
        "bottom": bottom,
        "x": chart.x.name,
        "y": chart.y.name,
        "across": [(across.place(value), render_axis(value, chart.x.form)) for value in across.ticks],
        "upward": [(upward.place(value), render_axis(value, chart.y.form)) for value in upward.ticks],
        "series": [
            {
                "colour": number % _NUM_COLOURS,
                "places": [(across.place(x), upward.place(y)) for x, y in series.points],
                "is_faint": series.is_faint,
                "line": len(series.points) > 1 and (chart.joined or series.is_faint),
                "size": (3.5 if chart.joined else 2.5) * _has_points(series),
            }
            for number, series in enumerate(chart.series)
        ],
        "labels": [_place_label(across.place(x), upward.place(y), text) for x, y, text in chart.labels],
        "legend": [
            (top + _HEIGHT + _LEGEND * number, series.name, number % _NUM_COLOURS)
            for number, series in enumerate(chart.series if len(chart.series) > 1 else ())
        ],
    }


def _place_label(x: float, y: float, text: str) -> tuple[float, float, str, str]:
    """Put a text beside its point, on the side with more room."""
    anchor, shift = ("end", -7) if x > 0.7 * _WIDTH else ("start", 7)
    return x + shift, y - 6, anchor, text


def _has_points(series: Series) -> bool:
    return series.is_marked or (len(series.points) == 1 and not series.is_faint)


@dataclass(frozen=True)
class _Scale:
    """From values to places in the picture."""

    ticks: Sequence[float]
    place: Callable[[float], float]


def _build_scale(values: Sequence[float], axis: ChartAxis, start: float, end: float) -> _Scale:
    """The scale for values of an axis from place `start` to place `end`; logarithmic ones need values above 0."""
    shape: Callable[[float], float] = math.log2 if axis.is_log else lambda value: value
    low, high = shape(min(values)), shape(max(values))
    low = low if axis.is_log else min(low, 0.0)
    margin = 0.04 * (high - low) or 0.5
    low, high = low - margin * (low != 0 or axis.is_log), high + margin

    def place(value: float) -> float:
        return start + (end - start) * (shape(value) - low) / (high - low)

    if axis.ticks or not axis.is_log:
        return _Scale(axis.ticks or pick_ticks(low, high), place)
    powers = [10.0**power for power in range(math.floor(low / math.log2(10)), math.ceil(high / math.log2(10)) + 1)]
    for steps in ((1,), (1, 3), (1, 2, 5)):
        ticks = [power * step for power in powers for step in steps if low <= math.log2(power * step) <= high]
        if len(ticks) > 2:
            break
    return _Scale(ticks, place)


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
