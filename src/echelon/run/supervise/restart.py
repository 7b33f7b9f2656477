"""Decide whether a failed group of processes is restarted, and with which message."""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.run.supervise.outcome import Outcome

logger = logging.getLogger(__name__)

AWAITS_VARIABLE = "ECHELON_AWAITS_MACHINES"
"""1 if whoever started this machine also replaces others, and counts each that ends: then it waits for them."""

LEAVING_VARIABLE = "ECHELON_MAY_LEAVE"
"""1 for the workers of a job that goes on when machines leave or join, for which they are told to stop."""

SAME_FAILURES = 3
"""The same failure this many times in a row, without a new checkpoint, ends the job even if restarts are left."""

_LOOK_SECONDS = 0.1
# The part of a message that differs between two occurrences of the same failure: the rank that failed first.
_WHO = re.compile(r"rank \d+ (\(pid \d+\) )?|; see \S+")


@dataclass(frozen=True)
class Failure:
    """The message of a failed attempt, and the step of the newest checkpoint; None if there was none."""

    message: str
    step: int | None


@dataclass
class Restarts:
    """Counts a job's failures and decides on each."""

    limit: int
    done: int = 0
    _last: Failure | None = None
    _in_a_row: int = 0

    def refuse(self, outcome: Outcome, step: int | None) -> Outcome | None:
        """Count a failure. Returns None for a restart, else the job's outcome, whose message has the reason.

        `step` is that of the newest checkpoint.
        """
        failure = Failure(_WHO.sub("", outcome.message), step)
        self._in_a_row = self._in_a_row + 1 if failure == self._last else 1
        self._last = failure
        if outcome.final or self.limit == 0:
            return outcome
        came_back = "the same failure occurred again without a new checkpoint"
        if self._in_a_row == SAME_FAILURES:
            why = f"{came_back}, {SAME_FAILURES} times in a row"
        elif self.done == self.limit:
            why = f"fault.max_restarts={self.limit} is reached" + (f"; {came_back}" if self._in_a_row > 1 else "")
        else:
            self.done += 1
            return None
        resume = "" if step is None else f"; the same command resumes from step {step}"
        return replace(outcome, message=f"{outcome.message}; not restarted: {why}{resume}")


class Vacancies:
    """Lets a machine wait in place for others, instead of ending a job that was left short of machines.

    At most `limit` times in a row without a new checkpoint.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: tuple[int | None, int] = (None, 0)

    def wait(self, message: str, step: int | None, asked: Sequence[object], seconds: float) -> bool:
        """Whether to meet the others again, after a time in which they end too; not if this machine is `asked` to stop.

        `message`: how the job has ended. `step`: that of the newest checkpoint.
        """
        count = self._last[1] + 1 if step == self._last[0] else 1
        self._last = step, count
        if count > self._limit:
            return False
        start = "from the beginning" if step is None else f"from step {step}"
        logger.warning(f"{message}; this machine waits for others in the place of those that left, and goes on {start}")
        until = time.monotonic() + seconds
        while not asked and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return not asked
