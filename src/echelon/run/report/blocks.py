"""The parts of a report, which are written as HTML and as text; and their values, read from nested mappings."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from echelon.ground.sizes import render_bytes, render_seconds

_LARGEST = 1e300
UNKNOWN = "unknown"

Point = tuple[float, float]
Form = Literal["number", "seconds", "bytes", "percent"]
"""How values of a picture are written."""
Tone = Literal["plain", "advice", "warning"]

_MANY_POINTS = 50
_WINDOW_SHARE = 0.02
_MOST_POINTS = 2000  # of a smoothed line: more than a picture has columns


@dataclass(frozen=True)
class Pairs:
    """Names with their values."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table; columns after the first are numbers unless `is_text`."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False


@dataclass(frozen=True)
class Series:
    """A named line; `is_marked`: its points are marked. `is_faint`: it is the background of another line."""

    name: str
    points: Sequence[Point]
    is_marked: bool = False
    is_faint: bool = False


@dataclass(frozen=True)
class Curves:
    """Lines over one axis. `form`: of the values."""

    name: str
    axis: str
    series: Sequence[Series]
    form: Form = "number"


@dataclass(frozen=True)
class Bars:
    """Rows of one bar each, on a common scale; a bar is divided into named parts."""

    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    form: Form


@dataclass(frozen=True)
class Mark:
    """A moment on a timeline; `is_bad` for failures."""

    seconds: float
    name: str
    is_bad: bool = False


@dataclass(frozen=True)
class Timeline:
    """Spans and moments in the seconds of a run; the spans are those in which its processes were there."""

    seconds: float
    spans: Sequence[tuple[float, float]]
    marks: Sequence[Mark]


@dataclass(frozen=True)
class HeatMap:
    """Values by row and column; None is unknown. `name` says what a cell is."""

    name: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    form: Form


@dataclass(frozen=True)
class Lines:
    """Sentences."""

    lines: Sequence[str]
    tone: Tone = "plain"


@dataclass(frozen=True)
class Listing:
    """Text as it is, such as a file; hidden until it is opened, and not part of the text report."""

    name: str
    text: str


Block = Pairs | Table | Curves | Bars | Timeline | HeatMap | Lines | Listing


@dataclass(frozen=True)
class ReportSection:
    """A headline with its blocks."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """A whole report. `status` is a word or two or empty, `summary` a sentence, `figures` the numbers to see first."""

    title: str
    status: str
    is_bad: bool
    summary: str
    figures: Sequence[tuple[str, str]]
    sections: Sequence[ReportSection]


def read_number(mapping: object, *path: str) -> float | None:
    """Return the finite number at nested keys; None if there is none."""
    value = read_value(mapping, *path)
    if isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST:
        return float(value)
    return None  # also NaN, which compares False


def read_numbers(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Return the finite numbers of this name, of the rows that have one."""
    return [value for row in rows if (value := read_number(row, name)) is not None]


def read_value(mapping: object, *path: str) -> Any:
    """Return the value at nested keys; None if there is none."""
    for key in path:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping


def read_mapping(mapping: object, *path: str) -> dict[str, Any]:
    """Return the mapping at nested keys; an empty one if there is none."""
    value = read_value(mapping, *path)
    return value if isinstance(value, dict) else {}


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the running median over a fiftieth of the points, centred; of very many, evenly spaced ones of them."""
    half = max(1, round(_WINDOW_SHARE * len(points) / 2))
    places = range(0, len(points), -(-len(points) // _MOST_POINTS) or 1)
    around = ([y for _, y in points[max(0, index - half) : index + half + 1]] for index in places)
    return [(points[index][0], statistics.median(near)) for index, near in zip(places, around, strict=True)]


def read_points(rows: Sequence[Mapping[str, Any]], name: str, axis: str = "step") -> list[Point]:
    """Return the known values of a field over another one."""
    pairs = ((read_number(row, axis), read_number(row, name)) for row in rows)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def draw_lines(name: str, points: Sequence[Point]) -> list[Series]:
    """Return a line; of many points, the smoothed line over a faint one."""
    if len(points) <= _MANY_POINTS:
        return [Series(name, points)]
    return [Series(f"{name}, each step", points, is_faint=True), Series(name, smooth(points))]


def render_number(value: float | None, digits: int = 4) -> str:
    """Format a number with this many digits, without exponents between 0.0001 and a billion: 1,234 or 0.0125."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    if places <= 0:
        return f"{value:,.0f}"
    return f"{value:.{digits - 1}e}" if places > digits + 3 else f"{value:,.{places}f}"


def render_percent(fraction: float | None) -> str:
    """Format a fraction as 12.3 %."""
    return UNKNOWN if fraction is None else f"{round(100 * fraction, 1) + 0.0:.1f} %"  # never -0.0


def render_value(value: float, form: Form) -> str:
    """Format a value of a picture."""
    if form == "bytes":
        return render_bytes(value)
    if form == "seconds":
        return render_seconds(value)
    return render_percent(value) if form == "percent" else render_number(value)


def render_axis(value: float, form: Form) -> str:
    """Format a round value at an axis."""
    if form != "number":
        return render_value(value, form)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def pick_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values from `low` to `high`, inside them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(step * index, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def pick_axis(low: float, high: float) -> list[float]:
    """Return the values to write along an axis of steps or tokens: whole ones, or the only value there is."""
    return [tick for tick in pick_ticks(low, high, count=6) if tick == int(tick)] or [low, high]
