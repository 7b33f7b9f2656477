"""The wall time of a run by cause, and durations as text."""

from collections.abc import Mapping

CAUSES = {
    "training": "in steps that count",
    "data": "waiting for data",
    "skipped": "in steps that were not applied",
    "evaluating": "evaluating",
    "saving": "waiting for a save",
    "starting": "starting",
    "recovering": "rolling back after a bad step",
    "redone": "in lost work that was repeated",
    "down": "not running after a failure",
    "stopped": "stopped on request, or finished",
}
"""What the time of a run is spent on: the keys of the event `goodput`, each with its description."""


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


def describe_goodput(seconds: Mapping[str, float]) -> str:
    """Describe the goodput and the causes of the rest, from the seconds of each cause in CAUSES.

    Time stopped on request does not count.
    """
    counted = {cause: spent for cause, spent in seconds.items() if cause != "stopped"}
    wall = max(sum(counted.values()), 1e-9)
    useful = counted.pop("training")
    lost = sorted(((spent / wall, cause) for cause, spent in counted.items()), reverse=True)
    shown = [f"{100 * share:.1f} % {CAUSES[cause]}" for share, cause in lost if share >= 0.0005]
    line = f"useful time (goodput) {100 * useful / wall:.1f} %: {render_duration(useful)} of {render_duration(wall)}"
    return "; ".join([f"{line} {CAUSES['training']}", *shown])
