"""Values of nested mappings and rows from a file, which may be missing or of another type; points of them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from echelon.run.report.blocks import Point, Series

_LARGEST = 1e300


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


_MANY_POINTS = 50
_WINDOW_SHARE = 0.02
_MOST_POINTS = 2000  # of a smoothed line: more than a picture has columns


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
