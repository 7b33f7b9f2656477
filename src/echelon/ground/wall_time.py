"""The wall time of a run by cause."""

from collections.abc import Mapping

from echelon.ground.sizes import render_duration

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
