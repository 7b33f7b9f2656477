"""Durations and sizes as text. Sizes in bytes have one system of units: B, KiB, MiB, GiB and TiB, powers of 1024.

GB stays where it is a vendor's figure: a card sold with 80 GB, a volume of 100 GB, a network of 3.2 GB/s.
"""

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render_duration(seconds: float | None) -> str:
    """Format seconds as 3d04h, 2h05m, 4m10s, 12s or <1s; a dash if unknown."""
    if seconds is None:
        return "-"
    if 0 < seconds < 1:
        return "<1s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def render_seconds(seconds: float | None) -> str:
    """Format a measured time with three digits: 3d04h, 4m10s, 1.24 s, 340 ms or 0.12 ms."""
    if seconds is None:
        return "unknown"
    if seconds >= 60:
        return render_duration(seconds)
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.{2 if 0 < seconds < 9.995 else 1}f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f} ms"


def render_gib(num_bytes: float) -> str:
    """Format a size in GiB with two digits after the point, where the lines of a log must have one unit: 0.87 GiB."""
    return f"{num_bytes / 2**30:.2f} " + _UNITS[3]


def render_bytes(num_bytes: float) -> str:
    """Format a size with three digits and its unit: 512 B, 1.50 KiB, 64.0 MiB, 1024 GiB."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{value:.0f} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def render_rate(rate: float) -> str:
    """Format bytes per second in the units of networks: 1.25 GB/s, 300 MB/s, 20 kB/s, 8 B/s."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if rate >= size:
            return f"{rate / size:.3g} {unit}/s"
    return f"{rate:.0f} B/s"


def count_noun(number: int, noun: str, ending: str = "s") -> str:
    """A number with its noun, which takes the ending unless there is one: `1 process`, `2 processes`."""
    return f"{number} {noun}{'' if number == 1 else ending}"


def join_words(words: Sequence[str], last: str = "or") -> str:
    """The words as a list in a sentence: `1, 2 or 4`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
