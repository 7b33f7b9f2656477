"""A report as one HTML file: no address, readable on a phone, light or dark like the reader's system.

The template `page.html.jinja` draws pictures as inline SVG, which stretches to the width of the page; their texts are
HTML. Lines keep their width at any size. Colours are the variables --c0 to --c7 of the page.

The page of a run in progress has a script, which asks its own server for the page again.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from echelon.ground.redaction import make_printable
from echelon.ground.sizes import render_seconds
from echelon.run.report.blocks import (
    Bars,
    Block,
    Curves,
    Form,
    HeatMap,
    Point,
    Report,
    Series,
    Timeline,
    pick_axis,
    pick_ticks,
    render_axis,
    render_value,
)
from echelon.run.report.run_record import percentile

_STYLE = Path(__file__).with_name("page.css")
_WIDTH, _HEIGHT = 1000, 300
_NUM_COLOURS = 8
# Lines with more points than this are drawn by the lowest and the highest point of each of so many columns.
_MAX_COLUMNS = 500
# Curves of many points are drawn up to this percentile if the largest value is so many times as large: a spike, or the
# loss of the first steps, would flatten the rest.
_USUAL, _SPIKE, _MANY = 0.97, 1.5, 50

# Nothing is loaded, whatever a name or a message in the run's files contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Takes the page again, and keeps what the reader has opened; says so if nobody answers.
_UPDATE = """setInterval(async () => {
  try {
    const answer = await fetch('/'), page = new DOMParser().parseFromString(await answer.text(), 'text/html')
    if (!answer.ok) throw answer.status
    const opened = [...document.querySelectorAll('details[open] summary')].map(each => each.textContent)
    document.querySelector('main').replaceWith(page.querySelector('main'))
    document.querySelectorAll('details').forEach(each => each.open = opened.includes(each.firstChild.textContent))
  } catch { document.querySelector('h1 small').textContent = 'echelon report --web does not answer' }
}, %d)"""


def render_template(name: str, **values: Any) -> str:
    """Return a template of this folder with these values, and control characters replaced."""
    return make_printable(_environment().get_template(name).render(values))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def render_page(report: Report, refresh_seconds: float | None = None) -> str:
    """Return the page; with `refresh_seconds` it asks the server that it came from for itself that often."""
    policy, script = _POLICY, ""
    if refresh_seconds is not None:
        script = _UPDATE % (1000 * refresh_seconds)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"{_POLICY}; connect-src 'self'; script-src 'sha256-{digest}'"
    return render_template(
        "page.html.jinja",
        report=report,
        sections=[(section.title, [_plot(block) for block in section.blocks]) for section in report.sections],
        policy=policy,
        script=script,
        style=_STYLE.read_text(encoding="utf-8"),
    )


def _plot(block: Block) -> tuple[str, Any]:
    """Return the name of a block's macro in the template, and what that shows."""
    kind = type(block).__name__.lower()
    match block:
        case Curves():
            return kind, _plot_curves(block)
        case Bars():
            return kind, _plot_bars(block)
        case Timeline():
            return kind, _plot_timeline(block)
        case HeatMap():
            return kind, _plot_heat_map(block)
        case _:
            return kind, block


def _plot_curves(curves: Curves) -> dict[str, Any]:
    """Return the lines of a picture, the labels of its axes, and its legend."""
    xs = [x for series in curves.series for x, _ in series.points]
    ys = [y for series in curves.series for _, y in series.points]
    low, high, is_cut = _find_range(ys, curves.form)
    left, right = min(xs), max(xs)
    colours = _find_colours(curves.series)
    drawn = list(zip(curves.series, colours, strict=True))
    return {
        "name": curves.name,
        "axis": curves.axis,
        "note": f"; values up to {render_value(max(ys), curves.form)} are cut off" if is_cut else "",
        "ticks": [
            ((1 - _scale(value, low, high)) * _HEIGHT, render_axis(value, curves.form))
            for value in pick_ticks(low, high)
        ],
        "steps": [(100 * _scale(value, left, right), render_axis(value, "number")) for value in pick_axis(left, right)],
        "lines": [_plot_series(series, colour, (left, right, low, high)) for series, colour in drawn],
        "legend": [(series.name, colour) for series, colour in drawn if not series.is_faint],
    }


def _plot_series(series: Series, colour: int, bounds: tuple[float, float, float, float]) -> dict[str, Any]:
    left, right, low, high = bounds
    points = [
        (_scale(x, left, right) * _WIDTH, (1 - min(1.05, _scale(y, low, high))) * _HEIGHT)
        for x, y in _thin(series.points)
    ]
    places = [f"{x:.1f},{y:.1f}" for x, y in points]
    return {"colour": colour, "places": places, "is_faint": series.is_faint, "is_marked": series.is_marked}


def _plot_bars(bars: Bars) -> dict[str, Any]:
    """Return the parts of each bar, and a legend, which has the shares of a single bar."""
    largest = max(sum(value for _, value in parts) for _, parts in bars.rows) or 1.0
    rows = []
    for label, parts in bars.rows:
        start, drawn = 0.0, []
        for index, (name, value) in enumerate(parts):
            width = _WIDTH * value / largest
            title = f"{name}: {render_value(value, bars.form)}"
            drawn.append((start, max(0.0, width - 1.5), index % _NUM_COLOURS, title))
            start += width
        rows.append((label, render_value(sum(value for _, value in parts), bars.form), drawn))
    names = [name for name, _ in bars.rows[0][1]]
    if is_single := len(bars.rows) == 1:
        parts = bars.rows[0][1]
        whole = sum(value for _, value in parts) or 1.0
        names = [f"{100 * value / whole:.1f} % {name} ({render_value(value, bars.form)})" for name, value in parts]
    legend = [(name, index % _NUM_COLOURS) for index, name in enumerate(names)]
    return {"rows": rows, "legend": legend, "is_list": is_single}


def _plot_timeline(timeline: Timeline) -> dict[str, Any]:
    """Return when processes were at work, and the marks of events."""
    whole = timeline.seconds or 1.0
    marks = []
    for mark in timeline.marks:
        kind = "bad" if mark.is_bad else "named" if mark.name else "minor"
        title = f"{mark.name or 'checkpoint'} after {render_seconds(mark.seconds)}"
        reach = (20, 280) if mark.name else (100, 200)
        marks.append((_WIDTH * min(1.0, mark.seconds / whole), kind, reach, title))
    spans = [(_WIDTH * start / whole, _WIDTH * (end - start) / whole) for start, end in timeline.spans]
    return {"spans": spans, "marks": marks, "whole": render_seconds(timeline.seconds)}


def _plot_heat_map(heat: HeatMap) -> dict[str, Any]:
    """Return a cell for each known value."""
    values = [value for row in heat.values for value in row if value is not None]
    low, high = min(values), max(values)
    wide, tall = _WIDTH / len(heat.columns), _HEIGHT / len(heat.rows)
    cells = [
        (
            along * wide,
            down * tall,
            0.08 + 0.92 * _scale(value, low, high),
            f"{name}, {heat.columns[along]}: {render_value(value, heat.form)}",
        )
        for down, (name, row) in enumerate(zip(heat.rows, heat.values, strict=True))
        for along, value in enumerate(row)
        if value is not None
    ]
    return {
        "name": heat.name,
        "rows": heat.rows,
        "cells": cells,
        "width": wide,
        "height": tall,
        "ends": (heat.columns[0], heat.columns[-1]),
        "scale": f"{render_value(low, heat.form)} (faint) to {render_value(high, heat.form)} (strong)",
    }


def _find_range(values: Sequence[float], form: Form) -> tuple[float, float, bool]:
    """Return the lowest and highest value to draw, and whether larger values are cut off."""
    low, high = min(values), max(values)
    usual = percentile(values, _USUAL)
    is_cut = len(values) > _MANY and usual > 0 and high > _SPIKE * usual
    high = 1.1 * usual if is_cut else high
    if form != "number":
        low = min(low, 0.0)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (low if low == 0 else low - margin), high + margin, is_cut


def _scale(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _thin(points: Sequence[Point]) -> list[Point]:
    """Keep the lowest and the highest point of each of _MAX_COLUMNS parts."""
    if len(points) <= 2 * _MAX_COLUMNS:
        return list(points)
    kept = []
    for part in range(_MAX_COLUMNS):
        near = points[part * len(points) // _MAX_COLUMNS : (part + 1) * len(points) // _MAX_COLUMNS]
        ends = {min(near, key=lambda point: point[1]), max(near, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _find_colours(all_series: Sequence[Series]) -> list[int]:
    """A faint line has the colour of the next one, which it is the background of."""
    colours, colour = [], 0
    for series in all_series:
        colours.append(colour % _NUM_COLOURS)
        colour += not series.is_faint
    return colours
