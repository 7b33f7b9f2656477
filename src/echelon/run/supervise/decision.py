"""What all machines of a job do after an attempt: each reports how it ended there, and the coordinator decides.

Also whether a failed group of processes is restarted, and with which message.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.ground.hosts import HostGroup
from echelon.ground.stored import open_to_append
from echelon.ground.variables import read_environment
from echelon.run.supervise.board import await_true
from echelon.run.supervise.outcome import (
    DONE,
    FAILED,
    REFUSED,
    SAME_FAILURES,
    STOPPED,
    Cause,
    Likelihood,
    Outcome,
    name_machine,
)

logger = logging.getLogger(__name__)

AWAITS_VARIABLE = "ECHELON_AWAITS_MACHINES"
"""1 if whoever started this machine also replaces others, and counts each that ends: then it waits for them."""

# Set by a script that starts machines: the file for the names of those that it should leave out the next time.
_BAD_MACHINES_VARIABLE = "ECHELON_BAD_MACHINES"

# The part of a message that differs between two occurrences of the same failure: the rank that failed first.
_WHO = re.compile(r"rank \d+ (\(pid \d+\) )?|; see \S+")


@dataclass
class Restarts:
    """Counts a job's failures and decides on each."""

    limit: int
    done: int = 0
    _last: tuple[str, int | None] | None = None
    _in_a_row: int = 0

    def refuse(self, outcome: Outcome, step: int | None) -> Outcome | None:
        """Count a failure. Returns None for a restart, else the job's outcome, whose message has the reason.

        `step` is that of the newest checkpoint.
        """
        failure = _WHO.sub("", outcome.message), step
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


def note_bad_machines(hosts: Iterable[str], ends: bool) -> None:
    """Tell whoever starts the machines of this job which ones are lost or bad. `ends`: for that the job ends."""
    names = sorted(set(map(name_machine, hosts)))
    if names and (path := read_environment().get(_BAD_MACHINES_VARIABLE)):
        with suppress(OSError), open_to_append(Path(path)) as file:
            file.write("".join(f"{name} {'ends' if ends else 'left'}\n" for name in names).encode())


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
        return not await_true(lambda: bool(asked), seconds)


@dataclass(frozen=True)
class HostReport:
    """How an attempt ended on one machine: the cause according to its ranks, and the newest checkpoint it sees."""

    host: str
    code: int
    message: str
    final: bool
    weight: int
    time: float
    step: int | None

    @staticmethod
    def of(host: str, cause: Cause, step: int | None) -> "HostReport":
        """The report of a machine."""
        outcome = cause.outcome
        return HostReport(host, outcome.code, outcome.message, outcome.final, int(cause.weight), cause.time, step)

    @property
    def outcome(self) -> Outcome:
        """How the machine's ranks ended."""
        return Outcome(self.code, self.message, self.final)


@dataclass(frozen=True)
class Decision:
    """What all machines do after an attempt: start another one, or end with this outcome.

    `restarts`: the number of restarts after failures so far, including this one. `leaving`: machines that were asked to
    stop and end, while the others continue. `bad`: those that are lost, or for whose faults the job ends. `is_short`:
    the job ends because machines are lost or were asked to stop, so the others could go on with new ones. `advice`:
    what the user can do where machines are lost, the end of the message.
    """

    goes_on: bool
    code: int
    message: str
    restarts: int
    step: int | None = None
    leaving: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    is_short: bool = False
    advice: str = ""

    def find_ending(self, host: str, own: Outcome) -> Outcome | None:
        """How a machine ends, whose own ranks ended like this; None if it takes part in another attempt."""
        if host in self.leaving:
            return Outcome(STOPPED if own.code == STOPPED else FAILED, own.message)
        return None if self.goes_on else Outcome(self.code, self.message + self.advice)


def decide(
    reports: Mapping[str, HostReport | None],
    asked: frozenset[str],
    group: HostGroup,
    restarts: Restarts,
    num_spares: int = 0,
    meets_again: bool = False,
) -> Decision:
    """The coordinator's decision; a machine without a report is lost. `num_spares`: so many others wait.

    `meets_again`: all were told to save and stop because a machine joins. The cause of the end is the report with the
    smallest weight, and of those the earliest.
    """
    tally = _Tally.of(reports, asked)
    first = tally.first
    is_growing = meets_again and not asked and first is not None and first.message.startswith("stopped by SIGTERM")
    ending = None if is_growing else tally.find_ending(group, num_spares)
    if ending is None and (asked or is_growing):
        # Machines leave or join: the others have saved and continue.
        return Decision(True, FAILED, "", restarts.done, tally.step, tuple(sorted(asked)), tally.lost)
    if ending is None:
        failure = tally.describe_failure()
        ending = failure if tally.num_staying + num_spares < group.min_nodes else restarts.refuse(failure, tally.step)
        if ending is None:
            return Decision(True, FAILED, failure.message, restarts.done, tally.step, bad=tally.lost)
    is_short = bool(tally.lost or asked) and ending.code not in (DONE, REFUSED)
    advice = _advise(group, len(reports), tally.step) if is_short and tally.lost else ""
    words, step, bad = ending.message, tally.step, tally.lost
    return Decision(False, ending.code, words, restarts.done, step, bad=bad, is_short=is_short, advice=advice)


def _advise(group: HostGroup, count: int, step: int | None) -> str:
    """What to do after the loss of a machine, one of `count`; and which request would not have ended with it."""
    words = "; the same command " + ("starts the run again" if step is None else f"resumes from step {step}")
    if group.may_leave or group.lives_on:
        return words
    least = max(1, count - 1)
    return f"{words}; with {least}:{count} machines (--nodes), or {count}+1, the others would have gone on"


@dataclass(frozen=True)
class _Tally:
    """The reports of an attempt, the likely cause first; the machines that are lost, or were asked to stop."""

    reports: tuple[HostReport, ...]
    lost: tuple[str, ...]
    asked: frozenset[str]

    @staticmethod
    def of(reports: Mapping[str, HostReport | None], asked: frozenset[str]) -> "_Tally":
        received = sorted(
            (report for report in reports.values() if report is not None),
            key=lambda report: (report.weight, report.time),
        )
        return _Tally(tuple(received), tuple(host for host, report in reports.items() if report is None), asked)

    @property
    def first(self) -> HostReport | None:
        return self.reports[0] if self.reports else None

    @property
    def step(self) -> int | None:
        return max((report.step for report in self.reports if report.step is not None), default=None)

    @property
    def num_staying(self) -> int:
        return len(self.reports) - len(self.asked - set(self.lost))

    def is_done(self, group: HostGroup) -> bool:
        """Whether the run has reached its end, on all machines that it needs."""
        return self.first is not None and self.first.code == DONE and (group.lives_on or not self.lost)

    def find_ending(self, group: HostGroup, num_spares: int) -> Outcome | None:
        """How the job ends even if restarts are left; None if it may continue."""
        first = self.first
        if first is not None and (first.code == REFUSED or self.is_done(group)):
            return first.outcome
        if self.asked and not (group.may_leave and self.num_staying + num_spares >= group.min_nodes):
            stopped = next((report for report in self.reports if report.code == STOPPED), first)
            return Outcome(FAILED, "stopped by a signal") if stopped is None else stopped.outcome
        return first.outcome if first is not None and first.code == STOPPED and not self.asked else None

    def describe_failure(self) -> Outcome:
        """What failed, with the machines that stopped responding, since those can cause a hang."""
        if self.first is None:
            return Outcome(FAILED, "every machine was lost")
        failure = self.first.outcome
        if not self.lost:
            return failure
        num_hosts = len(self.reports) + len(self.lost)
        silence = f"{len(self.lost)} of {num_hosts} machines stopped responding: {', '.join(self.lost)}"
        if self.first.weight == Likelihood.CAUSE:
            return replace(failure, message=f"{failure.message}; {silence}")
        return Outcome(FAILED, silence)
