"""The points of a curve, from the rows of a run, and the lines that show them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.run.report.blocks import Point, Series
from echelon.run.report.nested import read_number

_MANY_POINTS = 50
_WINDOW_SHARE = 0.02


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the running median over a fiftieth of the points, centred."""
    half = max(1, round(_WINDOW_SHARE * len(points) / 2))
    around = ([y for _, y in points[max(0, place - half) : place + half + 1]] for place in range(len(points)))
    return [(x, statistics.median(near)) for (x, _), near in zip(points, around, strict=True)]


def read_points(rows: Sequence[Mapping[str, Any]], name: str, axis: str = "step") -> list[Point]:
    """Return the known values of a field over another one."""
    pairs = ((read_number(row, axis), read_number(row, name)) for row in rows)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def draw_lines(name: str, points: Sequence[Point]) -> list[Series]:
    """Return a line; of many points, the smoothed line over a faint one."""
    if len(points) <= _MANY_POINTS:
        return [Series(name, points)]
    return [Series(f"{name}, each step", points, is_faint=True), Series(name, smooth(points))]
