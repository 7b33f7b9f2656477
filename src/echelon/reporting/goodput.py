"""Goodput: the fraction of a run's wall time spent in steps that count, and the causes of the rest."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from echelon.reporting.console import render_duration
from echelon.training.state import GoodputState

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
# What is done again when the run goes back to a checkpoint.
_WORK = ("training", "data", "skipped", "evaluating", "saving")


class GoodputTracker:
    """The wall time of a run since its first start, each second assigned to one cause.

    Each rank keeps one, and rank 0's goes into the checkpoints. So the seconds of a run that was killed are known up to
    its newest checkpoint, and the gap from there to the next start is what that kill cost.
    """

    def __init__(self, began: float | None = None) -> None:
        """`began`: when this start of the run began, as `time.time()` counts; now, if not given."""
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause = "starting"
        self._since = time.time() if began is None else began
        self._is_stopped = False

    def turn(self, cause: str) -> str:
        """Assign the time from now on to this cause; returns the previous cause."""
        now = time.time()
        self.seconds[self._cause] += max(0.0, now - self._since)  # a clock may be set back
        before, self._cause, self._since = self._cause, cause, now
        return before

    @contextmanager
    def spending(self, cause: str) -> Iterator[None]:
        """Assign the time of the block to this cause."""
        before = self.turn(cause)
        try:
            yield
        finally:
            self.turn(before)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move some time from one cause to another."""
        self.turn(self._cause)
        moved = min(seconds, self.seconds[source])
        self.seconds[source] -= moved
        self.seconds[target] += moved

    def stop(self) -> None:
        """What comes after the state that is saved next is no failure: the run was asked to stop."""
        self._is_stopped = True

    def go_back(self, seconds: Mapping[str, float]) -> None:
        """The run continues from a checkpoint of this same start, with these seconds: what was done since is redone."""
        for cause in _WORK:
            self.move(cause, "redone", self.seconds[cause] - seconds.get(cause, 0.0))

    def resume(self, saved: GoodputState, last_sign: float) -> None:
        """Go on from an earlier start of the run; this one has begun when this tracker has.

        Args:
            saved: what the checkpoint that the run goes on from has.
            last_sign: when the earlier start is last known to have been at work, as `time.time()` counts.
        """
        until, began = saved.until, self._since
        for cause in CAUSES:
            self.seconds[cause] += saved.seconds.get(cause, 0.0)
        redone = min(max(0.0, last_sign - until), max(0.0, began - until))
        self.seconds["redone"] += redone
        self.seconds["stopped" if saved.stopped else "down"] += max(0.0, began - until - redone)
        self._since = max(began, until)

    def state_dict(self) -> dict[str, Any]:
        """The seconds up to now, as JSON values."""
        self.turn(self._cause)
        return {"seconds": dict(self.seconds), "until": self._since, "stopped": self._is_stopped}

    def describe(self) -> str:
        """Goodput and what took the rest, for a person. The time that the run was stopped on request does not count."""
        self.turn(self._cause)
        counted = {cause: seconds for cause, seconds in self.seconds.items() if cause != "stopped"}
        wall = max(sum(counted.values()), 1e-9)
        useful = counted.pop("training")
        lost = sorted(((seconds / wall, cause) for cause, seconds in counted.items()), reverse=True)
        shown = [f"{100 * share:.1f} % {CAUSES[cause]}" for share, cause in lost if share >= 0.0005]
        line = f"goodput {100 * useful / wall:.1f} %: {render_duration(useful)} of {render_duration(wall)}"
        return "; ".join([f"{line} {CAUSES['training']}", *shown])
