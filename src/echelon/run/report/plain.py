"""A report as text for a terminal: curves in Braille characters, bars in blocks."""

from collections.abc import Iterator, Sequence

from echelon.ground.sizes import render_seconds
from echelon.run.report.blocks import (
    Bars,
    Block,
    Curves,
    HeatMap,
    Lines,
    Listing,
    Pairs,
    Report,
    Series,
    Table,
    Timeline,
    render_axis,
    render_value,
)

_PLOT_ROWS = 8
_LABEL_WIDTH = 10
# The bits of the dots of a Braille character: two columns of four.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800
_SHADES = " ░▒▓█"


def render_text(report: Report, width: int = 80) -> str:
    """Return the report as lines of about `width` characters."""
    lines = [f"{report.title}: {report.status}" if report.status else report.title, report.summary]
    lines += [""] if report.figures else []
    lines += _columns([(name, value) for name, value in report.figures])
    for section in report.sections:
        lines += ["", section.title, "-" * len(section.title)]
        for block in section.blocks:
            lines += _render_block(block, width)
    return "\n".join(lines)


def _render_block(block: Block, width: int) -> Iterator[str]:
    match block:
        case Pairs():
            yield from _columns(block.rows)
        case Table():
            yield from _render_table(block)
        case Curves():
            yield from _render_curves(block, width)
        case Bars():
            yield from _render_bars(block, width)
        case Timeline():
            yield _render_timeline(block, width)
        case HeatMap():
            yield from _render_heat_map(block)
        case Lines():
            yield from (f"- {line}" if block.tone != "plain" else line for line in block.lines)
        case Listing():
            return


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    wide = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{wide}}  {value}" for name, value in rows]


def _render_table(table: Table) -> Iterator[str]:
    rows = [tuple(table.head), *map(tuple, table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (
            cell.ljust(width) if table.is_text or index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *rest]).rstrip()


def _render_curves(curves: Curves, width: int) -> Iterator[str]:
    """Draw the lines that are not faint; each line of several has its own picture, on the same scale."""
    shown = [series for series in curves.series if not series.is_faint]
    points = [point for series in shown for point in series.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    bounds = (min(xs), max(xs), min(ys), max(ys))
    for series in shown:
        yield f"{curves.name}: {series.name}" if len(shown) > 1 else curves.name
        cells = _plot(series, bounds, width - _LABEL_WIDTH)
        for index, row in enumerate(cells):
            edge = {0: bounds[3], len(cells) - 1: bounds[2]}.get(index)
            label = "" if edge is None else render_axis(float(f"{edge:.4g}"), curves.form)
            yield f"{label:>{_LABEL_WIDTH - 2}} ▕{row}".rstrip()
        left, right = render_axis(bounds[0], "number"), f"{curves.axis} {render_axis(bounds[1], 'number')}"
        yield f"{'':{_LABEL_WIDTH}}{left}{right:>{width - _LABEL_WIDTH - len(left)}}"


def _plot(series: Series, bounds: tuple[float, float, float, float], width: int) -> list[str]:
    """Return rows of Braille characters with the line of the series."""
    left, right, low, high = bounds
    columns, dots = 2 * width, 4 * _PLOT_ROWS
    cells = [[0] * width for _ in range(_PLOT_ROWS)]
    before: tuple[int, int] | None = None
    for x, y in series.points:
        across = round((x - left) / ((right - left) or 1.0) * (columns - 1))
        down = dots - 1 - round((y - low) / ((high - low) or 1.0) * (dots - 1))
        for column, dot in _line(before or (across, down), (across, down)):
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = across, down
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in row) for row in cells]


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the dots from one to another."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for dot in range(length + 1):
        yield tuple(round(one + (other - one) * dot / length) for one, other in zip(start, end, strict=True))  # type: ignore[misc]


def _render_bars(bars: Bars, width: int) -> Iterator[str]:
    """Draw each part of a single bar, or the total of each of several, whose parts are in a table."""
    totals: Sequence[tuple[str, float]] = [(label, sum(value for _, value in parts)) for label, parts in bars.rows]
    if len(bars.rows) == 1:
        yield f"{totals[0][0]}: {render_value(totals[0][1], bars.form)}"
        totals = bars.rows[0][1]
    largest = max((value for _, value in totals), default=0.0) or 1.0
    whole = sum(value for _, value in totals) or 1.0
    wide = max(len(name) for name, _ in totals)
    room = max(10, width - wide - 22)
    for name, value in totals:
        share = f"{100 * value / whole:.1f} %" if len(bars.rows) == 1 else ""
        bar = "█" * round(room * value / largest)
        yield f"  {name:<{wide}}  {render_value(value, bars.form):>9}  {share:>7}  {bar}".rstrip()


def _render_timeline(timeline: Timeline, width: int) -> str:
    """Return a line: ━ where processes were at work, · where none were, ┃ at named moments, ✗ at failures."""
    whole, last = timeline.seconds or 1.0, width - 1
    cells = ["·"] * width
    for start, end in timeline.spans:
        for cell in range(round(last * start / whole), round(last * end / whole) + 1):
            cells[min(last, cell)] = "━"
    for mark in timeline.marks:
        if mark.name:
            cells[min(last, round(last * mark.seconds / whole))] = "✗" if mark.is_bad else "┃"
    return "".join(cells) + f"\n{'0'}{render_seconds(timeline.seconds):>{width - 1}}"


def _render_heat_map(heat: HeatMap) -> Iterator[str]:
    values = [value for row in heat.values for value in row if value is not None]
    low, high = min(values), max(values)
    yield f"{heat.name}: {render_value(low, heat.form)} (light) to {render_value(high, heat.form)} (dark)"
    wide = max(map(len, heat.rows))
    for name, row in zip(heat.rows, heat.values, strict=True):
        cells = (
            "?" if value is None else _SHADES[round((len(_SHADES) - 1) * (value - low) / ((high - low) or 1.0))]
            for value in row
        )
        yield f"{name:<{wide}}  {''.join(cells)}"
