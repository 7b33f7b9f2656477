"""Numbers of a report as text."""

import math

from echelon.ground.sizes import render_bytes, render_seconds
from echelon.run.report.blocks import Form

UNKNOWN = "unknown"


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
