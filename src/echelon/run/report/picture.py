"""Pictures as SVG files of their own, which browsers and Markdown pages show: lines and points over two axes.

The pictures inside a report have their text in HTML (`drawing.py`); a file has it in the picture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from echelon.ground.redaction import make_printable
from echelon.run.report.blocks import Form, Series
from echelon.run.report.numbers import pick_ticks, render_axis

_WIDTH, _HEIGHT = 640, 340  # of one chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 44, 46
_LEGEND = 20  # a line of the legend
_STYLE = Path(__file__).with_name("page.css")
_NUM_COLOURS = 8


@dataclass(frozen=True)
class Axis:
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
    x: Axis
    y: Axis
    series: Sequence[Series]
    joined: bool = True
    labels: Sequence[tuple[float, float, str]] = ()


def draw_picture(charts: Sequence[Chart]) -> str:
    """Return an SVG document with the charts below each other. A chart has at least one point."""
    body, top = [], 0
    for chart in charts:
        drawn, height = _draw_chart(chart, top)
        body += drawn
        top += height
    title = escape("; ".join(chart.title for chart in charts))
    return make_printable(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
        f'role="img" aria-label="{title}">\n<style>{_find_colours()}\n'
        ".back{fill:var(--paper)} text{font:12px system-ui,sans-serif;fill:var(--ink)} .title{font-weight:600} "
        ".grid{stroke:var(--rule)} .line{fill:none;stroke-width:2} .faint{stroke-width:1;stroke-dasharray:4 3}"
        f'</style>\n<rect class="back" width="{_WIDTH}" height="{top}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _find_colours() -> str:
    """The colours of the report's page, light and dark: the variables at the beginning of its style."""
    style = _STYLE.read_text(encoding="utf-8")
    return style[style.index(":root") : style.index("* {")].strip()


def _draw_chart(chart: Chart, top: int) -> tuple[list[str], int]:
    """The elements of a chart and its height."""
    points = [point for series in chart.series for point in series.points]
    across = _build_scale([x for x, _ in points], chart.x, _LEFT, _WIDTH - _RIGHT)
    upward = _build_scale([y for _, y in points], chart.y, top + _HEIGHT - _BOTTOM, top + _TOP)
    body = _draw_axes(chart, top, across, upward)
    for number, series in enumerate(chart.series):
        body += _draw_series(series, number % _NUM_COLOURS, chart.joined, across.place, upward.place)
    for x, y, text in chart.labels:
        at = across.place(x)
        anchor, shift = ("end", -7) if at > 0.7 * _WIDTH else ("start", 7)
        place = f'x="{at + shift:.1f}" y="{upward.place(y) - 6:.1f}" text-anchor="{anchor}"'
        body.append(f"<text {place}>{escape(text)}</text>")
    legend = _draw_legend(chart, top + _HEIGHT)
    return body + legend, _HEIGHT + len(legend) // 2 * _LEGEND + (8 if legend else 0)


def _draw_axes(chart: Chart, top: int, across: "_Scale", upward: "_Scale") -> list[str]:
    """The title, the names of both axes, their ticks, and a line at each tick of the upward one."""
    bottom, middle = top + _HEIGHT - _BOTTOM, (_LEFT + _WIDTH - _RIGHT) / 2
    body = [f'<text class="title" x="{_LEFT}" y="{top + 24}">{escape(chart.title)}</text>']
    for value in upward.ticks:
        y, text = upward.place(value), render_axis(value, chart.y.form)
        body.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value in across.ticks:
        x, text = across.place(value), render_axis(value, chart.x.form)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        body.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
    body.append(f'<text x="{middle:.0f}" y="{bottom + 38}" text-anchor="middle">{escape(chart.x.name)}</text>')
    body.append(f'<text x="{_LEFT}" y="{top + 39}">{escape(chart.y.name)}</text>')
    return body


def _draw_legend(chart: Chart, bottom: int) -> list[str]:
    """A square and the name of each series, if there are several."""
    body: list[str] = []
    for number, series in enumerate(chart.series if len(chart.series) > 1 else ()):
        y = bottom + _LEGEND * number
        body.append(
            f'<rect x="{_LEFT}" y="{y - 9}" width="10" height="10" style="fill:var(--c{number % _NUM_COLOURS})"/>'
        )
        body.append(f'<text x="{_LEFT + 16}" y="{y}">{escape(series.name)}</text>')
    return body


def _draw_series(
    series: Series, colour: int, joined: bool, across: Callable[[float], float], upward: Callable[[float], float]
) -> list[str]:
    places = [(across(x), upward(y)) for x, y in series.points]
    drawn = []
    if len(places) > 1 and (joined or series.is_faint):
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
        kind = "line faint" if series.is_faint else "line"
        drawn.append(f'<path class="{kind}" style="stroke:var(--c{colour})" d="M{path}"/>')
    if series.is_marked or (len(places) == 1 and not series.is_faint):
        size = 3.5 if joined else 2.5
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" style="fill:var(--c{colour})"/>' for x, y in places]
    return drawn


@dataclass(frozen=True)
class _Scale:
    """From values to places in the picture."""

    ticks: Sequence[float]
    place: Callable[[float], float]


def _build_scale(values: Sequence[float], axis: Axis, start: float, end: float) -> _Scale:
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
