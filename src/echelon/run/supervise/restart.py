"""Decide whether a failed group of processes is restarted, and with which message."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from echelon.ground.stored import write_text
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import FAILED, STOPPED, Outcome, read_outcomes

logger = logging.getLogger(__name__)

AWAITS_VARIABLE = "ECHELON_AWAITS_MACHINES"
"""1 if whoever started this machine also replaces others, and counts each that ends: then it waits for them."""

LEAVING_VARIABLE = "ECHELON_MAY_LEAVE"
"""1 for the workers of a job that goes on when machines leave or join, for which they are told to stop."""

SAME_FAILURES = 3
"""The same failure this many times in a row, without a new checkpoint, ends the job even if restarts are left."""

_LOOK_SECONDS = 0.1
# How long workers may take to exit after a peer died. Longer than `_KILLED_BY_AGENT_SECONDS` in outcome.py.
_PATIENCE_SECONDS = 6.0
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


class DeathWatch:
    """Watches the workers; `died_at` is when the first one died, None if none has or the system cannot tell."""

    def __init__(self, folder: RunFolder, num_processes: int) -> None:
        self.died_at: float | None = None
        self._folder = folder
        self._num_processes = num_processes
        self._pids: dict[int, int] = {}
        self._left: set[int] = set()
        self._over = threading.Event()

    def watch(self) -> None:
        """Wait for a worker that fails, and record it in the run folder, so that its peers, which may hang, exit.

        Workers are the processes that wrote their pid: this process may have other children. The agent reaps the dead
        one.
        """
        while not self._over.wait(_LOOK_SECONDS):
            if len(self._pids) - len(self._left) < self._num_processes:  # the folder may be on another machine
                self._pids = self._folder.read_pids()
                self._left &= set(self._pids.values())
            ended = [(rank, pid) for rank, pid in self._pids.items() if pid not in self._left and not _is_alive(pid)]
            # A rank that exited normally may have a successor: torchrun's agent restarts all when a machine joins.
            self._left |= {pid for rank, pid in ended if not _has_failed(self._folder, rank, pid)}
            if any(pid not in self._left for _, pid in ended):
                self.died_at = time.time()
                with suppress(OSError):  # the disk may be full; the agent also ends them, later
                    write_text(self._folder.death_path, "a rank has died\n")
                if not self._over.wait(_PATIENCE_SECONDS):
                    self._kill_the_rest()
                return

    def _kill_the_rest(self) -> None:
        """Kill the other workers: a suspended one handles no SIGTERM, and the agent would wait half a minute for it."""
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                if _is_alive(pid):
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the watching thread."""
        self._over.set()


@contextmanager
def deaths_watched(folder: RunFolder, num_processes: int) -> Iterator[DeathWatch]:
    """Watch the workers of a run, children of this process, during the block."""
    watch = DeathWatch(folder, num_processes)
    thread = threading.Thread(target=watch.watch, name="death-watch", daemon=True)
    if hasattr(os, "waitid"):  # on macOS since Python 3.13
        thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        if thread.is_alive():
            thread.join()


def forget_ended(folder: RunFolder) -> None:
    """Remove what this machine's ended ranks have written, before new ranks of the same numbers write theirs."""
    for rank, pid in folder.read_pids().items():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            for name in (f"pid-{rank}", f"rank-{rank}.json", f"resting-{rank}", f"late-{rank}", f"hanging-{rank}"):
                (folder.outcomes_dir / name).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    """Whether this child is still running; does not reap it, which the agent does."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # already reaped
        return False


def _has_failed(folder: RunFolder, rank: int, pid: int) -> bool:
    """Whether this ended child has neither exit code 0 nor a report of a stop."""
    ends = {outcome.rank: outcome.code for outcome in read_outcomes(folder.outcomes_dir)}
    if ends.get(rank) == STOPPED:
        return False
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # already reaped by the agent; a rank that ended well has a report
        return ends.get(rank, FAILED) == FAILED
    return status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0)
