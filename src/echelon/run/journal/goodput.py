"""Goodput: the fraction of a run's wall time spent in steps that count, and the causes of the rest."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from echelon.ground.launch_environment import read_clock
from echelon.ground.wall_time import CAUSES, describe_goodput
from echelon.run.training.state import GoodputState

# Causes whose time is lost and repeated if the run returns to a checkpoint.
_WORK = ("training", "data", "skipped", "evaluating", "saving")


class GoodputTracker:
    """The wall time of a run since its first start, each second assigned to one cause.

    Each rank has one, and rank 0's is saved in checkpoints. The seconds of a run that was killed are therefore known up
    to its newest checkpoint, and the gap from there to the next start is the cost of the failure.
    """

    def __init__(self, began: float | None = None) -> None:
        """`began`: when this start of the run began, as in `read_clock`; None for now."""
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause = "starting"
        self._since = read_clock() if began is None else began
        self._is_stopped = False

    def turn(self, cause: str) -> str:
        """Assign the time from now on to this cause; return the previous cause."""
        now = read_clock()
        self.seconds[self._cause] += max(0.0, now - self._since)  # the clock may have been ahead in an earlier start
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
        """Record a stop on request: the time after the next saved state does not count as a failure."""
        self._is_stopped = True

    def go_back(self, seconds: Mapping[str, float]) -> None:
        """Return to a checkpoint of this start, with these seconds: the work since then counts as redone."""
        for cause in _WORK:
            self.move(cause, "redone", self.seconds[cause] - seconds.get(cause, 0.0))

    def resume(self, saved: GoodputState, last_sign: float) -> None:
        """Continue from an earlier start of the run. The current start began when this tracker began.

        Args:
            saved: the state in the checkpoint that the run resumes from.
            last_sign: when the earlier start was last known to be running, as in `time.time()`.
        """
        until, began = saved.until, self._since
        for cause in CAUSES:
            self.seconds[cause] += saved.seconds.get(cause, 0.0)
        redone = min(max(0.0, last_sign - until), max(0.0, began - until))
        self.seconds["redone"] += redone
        self.seconds["stopped" if saved.stopped else "down"] += max(0.0, began - until - redone)
        self._since = max(began, until)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds up to now, as JSON values."""
        self.turn(self._cause)
        return {"seconds": dict(self.seconds), "until": self._since, "stopped": self._is_stopped}

    @property
    def wall_seconds(self) -> float:
        """The wall time of the run so far, without time stopped on request."""
        self.turn(self._cause)
        return sum(self.seconds.values()) - self.seconds["stopped"]

    def describe(self) -> str:
        """Describe the goodput and the causes of the rest. Time stopped on request does not count."""
        self.turn(self._cause)
        return describe_goodput(self.seconds)
