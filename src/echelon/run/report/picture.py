"""Pictures as SVG files of their own, which browsers and Markdown pages show: lines and points over two axes.

The pictures inside a report have their text in HTML (`page.py`); a file has it in the picture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.run.report.blocks import Form, Series
from echelon.run.report.page import render_template
from echelon.run.report.values import pick_ticks, render_axis

_WIDTH, _HEIGHT = 640, 340  # of one chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 44, 46
_LEGEND = 20  # a line of the legend
_STYLE = Path(__file__).with_name("page.css")
_NUM_COLOURS = 8


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
