"""The pictures of a report: inline SVG that stretches to the width of the page, with its text beside it in HTML.

Lines keep their width at any size of the picture. Colours are the variables --c0 to --c7 of the page.
"""

from collections.abc import Sequence
from html import escape

from echelon.ground.sizes import render_seconds
from echelon.run.report.blocks import Bars, Curves, Form, HeatMap, Point, Series, Timeline
from echelon.run.report.numbers import pick_axis, pick_ticks, render_axis, render_value
from echelon.run.report.run_record import percentile

_WIDTH, _HEIGHT = 1000, 300
_NUM_COLOURS = 8
# Lines with more points than this are drawn by the lowest and the highest point of each of so many columns.
_MAX_COLUMNS = 500
# Curves of many points are drawn up to this percentile if the largest value is so many times as large: a spike, or the
# loss of the first steps, would flatten the rest.
_USUAL, _SPIKE, _MANY = 0.97, 1.5, 50


def draw_curves(curves: Curves) -> str:
    """Draw lines over a common axis, with a legend if there are several."""
    xs = [x for series in curves.series for x, _ in series.points]
    ys = [y for series in curves.series for _, y in series.points]
    low, high, is_cut = _find_range(ys, curves.form)
    bounds = (min(xs), max(xs), low, high)
    ticks = pick_ticks(low, high)
    heights = [(1 - _scale(value, low, high)) * _HEIGHT for value in ticks]
    colours = _find_colours(curves.series)
    lines = [f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights]
    lines += [_draw_series(series, colour, bounds) for series, colour in zip(curves.series, colours, strict=True)]
    labels = "".join(
        f'<span style="top:{100 * y / _HEIGHT:.2f}%">{render_axis(value, curves.form)}</span>'
        for value, y in zip(ticks, heights, strict=True)
    )
    ends = _label_axis(curves.axis, bounds[0], bounds[1])
    named = [
        (series.name, colour) for series, colour in zip(curves.series, colours, strict=True) if not series.is_faint
    ]
    note = f"; values up to {render_value(max(ys), curves.form)} are cut off" if is_cut else ""
    picture = _svg("".join(lines), f"{curves.name} by {curves.axis}")
    frame = f'<div class="labels">{labels}</div><div class="frame">{picture}</div>'
    return (
        f"<figure><figcaption>{escape(curves.name)}<small>{note}</small></figcaption>"
        f'<div class="plot">{frame}</div>{ends}{_legend(named)}</figure>'
    )


def _draw_series(series: Series, colour: int, bounds: tuple[float, float, float, float]) -> str:
    left, right, low, high = bounds
    points = [
        (_scale(x, left, right) * _WIDTH, (1 - min(1.05, _scale(y, low, high))) * _HEIGHT)
        for x, y in _thin(series.points)
    ]
    places = [f"{x:.1f},{y:.1f}" for x, y in points]
    style = f'style="stroke:var(--c{colour})"'
    kind = "line faint" if series.is_faint else "line"
    drawn = f'<path class="{kind}" {style} d="M{"L".join(places)}"/>' if len(points) > 1 else ""
    if series.is_marked or len(points) == 1:
        drawn += f'<path class="dots" {style} d="{"".join(f"M{place}h0" for place in places)}"/>'
    return drawn


def draw_bars(bars: Bars) -> str:
    """Draw divided bars on a common scale, with the values in the legend."""
    largest = max(sum(value for _, value in parts) for _, parts in bars.rows) or 1.0
    names = [name for name, _ in bars.rows[0][1]]
    drawn = []
    for label, parts in bars.rows:
        start, body = 0.0, []
        for place, (name, value) in enumerate(parts):
            width = _WIDTH * value / largest
            title = f"<title>{escape(name)}: {render_value(value, bars.form)}</title>"
            body.append(
                f'<rect x="{start:.2f}" y="0" width="{max(0.0, width - 1.5):.2f}" height="{_HEIGHT}" '
                f'style="fill:var(--c{place % _NUM_COLOURS})">{title}</rect>'
            )
            start += width
        total = render_value(sum(value for _, value in parts), bars.form)
        drawn.append(
            f'<div class="bar"><div class="ends"><span>{escape(label)}</span><span>{total}</span></div>'
            f"{_svg(''.join(body), label)}</div>"
        )
    only = bars.rows[0][1] if len(bars.rows) == 1 else None
    whole = sum(value for _, value in only) or 1.0 if only else 1.0
    told = [
        name
        if only is None
        else f"{100 * only[place][1] / whole:.1f} % {name} ({render_value(only[place][1], bars.form)})"
        for place, name in enumerate(names)
    ]
    legend = _legend([(name, place % _NUM_COLOURS) for place, name in enumerate(told)], is_list=only is not None)
    return f"<figure>{''.join(drawn)}{legend}</figure>"


def draw_timeline(timeline: Timeline) -> str:
    """Draw spans as a band, and moments as lines across it; the names of moments appear under the pointer."""
    whole = timeline.seconds or 1.0
    body = [_block("gap", 0, _WIDTH)]
    body += [_block("span", _WIDTH * start / whole, _WIDTH * (end - start) / whole) for start, end in timeline.spans]
    for mark in timeline.marks:
        x = _WIDTH * min(1.0, mark.seconds / whole)
        kind = "bad" if mark.is_bad else "named" if mark.name else "minor"
        reach = (20, 280) if mark.name else (100, 200)
        title = f"<title>{escape(mark.name or 'checkpoint')} after {render_seconds(mark.seconds)}</title>"
        body.append(
            f'<line class="mark {kind}" x1="{x:.2f}" x2="{x:.2f}" y1="{reach[0]}" y2="{reach[1]}">{title}</line>'
        )
    names = {"span": "processes at work", "minor": "checkpoint", "named": "start, stop", "bad": "failure"}
    legend = "".join(f'<li><i class="key-{kind}"></i>{name}</li>' for kind, name in names.items())
    ends = _axis("0", "time since the first start", render_seconds(timeline.seconds))
    picture = f'<div class="timeline">{_svg("".join(body), "timeline")}</div>'
    return f'<figure>{picture}{ends}<ul class="legend">{legend}</ul></figure>'


def draw_heat_map(heat: HeatMap) -> str:
    """Draw a cell for each value, stronger for larger ones, between the smallest and the largest value."""
    known = [value for row in heat.values for value in row if value is not None]
    low, high = min(known), max(known)
    wide, tall = _WIDTH / len(heat.columns), _HEIGHT / len(heat.rows)
    body = []
    for down, (name, row) in enumerate(zip(heat.rows, heat.values, strict=True)):
        for along, value in enumerate(row):
            if value is None:
                continue
            title = f"<title>{escape(name)}, {escape(heat.columns[along])}: {render_value(value, heat.form)}</title>"
            shade = 0.08 + 0.92 * _scale(value, low, high)
            place = f'x="{along * wide:.2f}" y="{down * tall:.2f}" width="{wide + 0.3:.2f}" height="{tall:.2f}"'
            body.append(f'<rect class="cell" {place} style="fill-opacity:{shade:.3f}">{title}</rect>')
    labels = "".join(
        f'<span style="top:{100 * (place + 0.5) / len(heat.rows):.2f}%">{escape(name)}</span>'
        for place, name in enumerate(heat.rows)
    )
    scale = f"{render_value(low, heat.form)} (faint) to {render_value(high, heat.form)} (strong)"
    picture = _svg("".join(body), heat.name)
    frame = f'<div class="labels">{labels}</div><div class="frame heat">{picture}</div>'
    return (
        f"<figure><figcaption>{escape(heat.name)}<small>; {scale}</small></figcaption>"
        f'<div class="plot" style="--rows:{len(heat.rows)}">{frame}</div>'
        f"{_axis(heat.columns[0], '', heat.columns[-1])}</figure>"
    )


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


def _legend(entries: Sequence[tuple[str, int]], is_list: bool = False) -> str:
    if len(entries) < 2 and not is_list:
        return ""
    items = "".join(f'<li><i style="background:var(--c{colour})"></i>{escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend{" tall" if is_list else ""}">{items}</ul>'


def _block(kind: str, start: float, width: float) -> str:
    return f'<rect class="{kind}" x="{start:.2f}" y="100" width="{max(2.0, width):.2f}" height="100"/>'


def _axis(left: str, name: str, right: str) -> str:
    return f'<div class="axis"><span>{escape(left)}</span><span>{escape(name)}</span><span>{escape(right)}</span></div>'


def _label_axis(name: str, left: float, right: float) -> str:
    """The values along an axis, each below its place, and the name of the axis."""
    labels = "".join(
        f'<span style="left:{100 * _scale(value, left, right):.2f}%">{render_axis(value, "number")}</span>'
        for value in pick_axis(left, right)
    )
    return f'<div class="ticks">{labels}</div>{_axis("", name, "")}'


def _svg(body: str, label: str) -> str:
    head = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}"'
    return f"<svg {head}>{body}</svg>"
