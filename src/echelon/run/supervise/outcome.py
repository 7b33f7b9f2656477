"""The outcomes of a job's ranks, reduced to one exit code and one message.

Each worker writes `rank-N.json` before it exits. When one rank fails, the others soon fail too, because they lost a
peer. The message must come from the first failure, so a report records whether it is only such a secondary error.
"""

import json
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path

from echelon.ground.errors import ConfigError, DataError, EchelonError, LaunchError, PlanError
from echelon.ground.open_files import explain_open_files
from echelon.ground.stored import open_regular, read_as, read_text, write_json, write_text

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 3

LEAVING_VARIABLE = "ECHELON_MAY_LEAVE"
"""1 for the workers of a job that goes on when machines leave or join, for which they are told to stop."""

SAME_FAILURES = 3
"""The same failure this many times in a row, without a new checkpoint, ends the job even if restarts are left."""

MACHINE_LOST = -1000
"""The exit code of a process whose machine was lost."""

LOST_SECONDS = 12.0
"""A machine that is silent for this long is lost: without a heartbeat, or an answer on a connection between ranks."""

# The agent kills a worker that outlives its SIGTERM by this many seconds: such a death is not a cause.
_KILLED_BY_AGENT_SECONDS = 5.0

_REPORT_BYTES = 4096

# Error messages of gloo, NCCL and the store when the process at the other end is gone, or did not come. NCCL reports a
# lost peer also as a failed call of CUDA or an internal error; only its invalid arguments and usage are this rank's.
_PEER_VANISHED = re.compile(
    r"connection closed by peer|connection reset|broken pipe|connection refused|read error|socket closed"
    r"|unexpected EOF|remote (process|peer|error)|nccl(Remote|System|Internal|UnhandledCuda)Error"
    r"|NCCL communicator (was aborted|encountered error)|Watchdog caught collective operation timeout"
    r"|timed out in blocking wait|NCCL timeout in: "
    r"|failed to recv|recvValue failed|sendBytes failed|recv, got 0 bytes|connectFullMesh failed|caused pair closure",
    re.IGNORECASE,
)

# What is in the log before a thread of NCCL or gloo aborts the process: torch's words, with a C++ stack after them, or
# those of C++ for gloo's exception, which nobody catches.
_ABORTED = re.compile(
    rb"thread terminated with exception: (.+)|(ProcessGroupNCCL's watchdog got stuck for .+)|"
    rb"^  what\(\): +(\[enforce fail .+)",
    re.MULTILINE,
)
_LAST_BYTES, _REASON_LENGTH = 2**16, 400


@dataclass(frozen=True)
class Outcome:
    """How a job, or one command, ended: the exit code of the contract, and the message to show.

    `final`: a restart would end in the same way.
    """

    code: int
    message: str = ""
    final: bool = False


@dataclass(frozen=True)
class RankOutcome:
    """A rank's report; `time` is in UTC seconds.

    `secondary`: it is only a consequence of a peer's failure. `final`: a restart would end in the same way.
    """

    rank: int
    code: int
    message: str
    time: float
    secondary: bool = False
    final: bool = False


@dataclass(frozen=True)
class ProcessDeath:
    """A process that the agent saw end with a non-zero exit code, or by a signal (negative)."""

    rank: int
    pid: int
    exit_code: int
    time: float


def name_machine(host: str) -> str:
    """The name of a machine, without the part that tells equal names apart."""
    return host.partition(" ")[0]


@dataclass(frozen=True)
class RankExit:
    """How a process has ended, as the agent of its machine tells the keeper.

    Attributes:
        member: the name of the process.
        host: its machine.
        outcome: what it has reported; None if it has reported nothing.
    """

    member: str
    rank: int
    pid: int
    code: int
    time: float
    host: str
    outcome: RankOutcome | None = None

    @property
    def death(self) -> ProcessDeath:
        """The end of the process, as the agent saw it."""
        return ProcessDeath(self.rank, self.pid, self.code, self.time)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended in another way than a rank that is done, stopped or refused."""
        return self.code != 0 or self.outcome is None

    @property
    def error(self) -> RankOutcome | None:
        """Its report of a failure; None if it has reported none."""
        return self.outcome if self.outcome is not None and self.outcome.code == FAILED else None


def is_secondary(error: BaseException) -> bool:
    """Whether the error only means that a peer is gone, whose own report has the cause."""
    if isinstance(error, ConfigError | PlanError | DataError | LaunchError):
        return False
    if isinstance(error, RuntimeError | ConnectionError) and _PEER_VANISHED.search(str(error)):
        return True
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and is_secondary(cause)


def is_final(error: BaseException) -> bool:
    """Whether a restart from the newest checkpoint would end in the same error: true for errors raised by echelon.

    Steps repeat bit for bit, so a non-finite loss occurs again, and a full disk stays full. Only a failed rendezvous
    may succeed the next time.
    """
    return isinstance(error, EchelonError) and not isinstance(error, LaunchError) and not is_secondary(error)


def reserve_outcome(directory: Path, rank: int) -> None:
    """Reserve disk space for a report in advance: it may have to report a full disk."""
    write_text(directory / f"rank-{rank}.json", " " * _REPORT_BYTES)


def write_outcome(directory: Path, outcome: RankOutcome) -> None:
    """Write this rank's report; on a full disk, into the space reserved by `reserve_outcome`."""
    path = directory / f"rank-{outcome.rank}.json"
    try:
        write_json(path, asdict(outcome))
    except OSError:
        shortened = replace(outcome, message=outcome.message[: _REPORT_BYTES // 8])
        with path.open("r+b") as file:
            file.write(json.dumps(asdict(shortened)).encode().ljust(_REPORT_BYTES))


def read_outcomes(directory: Path) -> list[RankOutcome]:
    """The reports in a folder, by rank; unreadable reports are left out."""
    outcomes = []
    for path in directory.glob("rank-*.json"):
        try:
            outcomes.append(read_as(path, RankOutcome))
        except (OSError, ValueError):
            continue
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def is_peer_leaving(directory: Path) -> bool:
    """Whether a rank was refused or stopped after a save: then its peers' errors need no restart."""
    return any(outcome.code in (REFUSED, STOPPED) and not outcome.secondary for outcome in read_outcomes(directory))


class Likelihood(IntEnum):
    """How likely an outcome is the cause: of several outcomes, the smallest weight caused the others."""

    CAUSE = 0
    DEATH = 1
    ECHO = 2
    NOTHING = 3


@dataclass(frozen=True)
class Cause:
    """What ended a group of ranks, its weight, and when it happened (UTC seconds)."""

    outcome: Outcome
    weight: Likelihood
    time: float


def find_silent(directory: Path) -> list[int]:
    """The ranks that have reserved a report and written none."""
    blank = [path for path in directory.glob("rank-*.json") if not read_text(path).strip()]
    return sorted(int(path.stem.removeprefix("rank-")) for path in blank)


def find_cause(
    outcomes: Sequence[RankOutcome], deaths: Sequence[ProcessDeath], logs_dir: Path, silent: Sequence[int] = ()
) -> Cause:
    """Find what ended these ranks first.

    In this order: a process killed by a signal that neither agents nor collectives send; the earliest report that is
    not secondary; an abort (also raised by a collective when a peer dies or does not come: an abort whose log says that
    comes after others); a process that exited without a report; a process ended by SIGTERM; one that
    exited with code 0 before the end; a secondary report.

    `silent`: ranks that have written no report.
    """
    reports = sorted((outcome for outcome in outcomes if outcome.code != DONE), key=lambda outcome: outcome.time)
    cause = next((report for report in reports if not report.secondary), None)
    accident = _find_accident(deaths, math.inf if cause is None else cause.time)
    if accident is not None:
        return Cause(_describe_death(accident, logs_dir), Likelihood.CAUSE, accident.time)
    if cause is not None:
        return Cause(Outcome(cause.code, cause.message, cause.final), Likelihood.CAUSE, cause.time)
    reported = {report.rank for report in reports}
    unexplained = [death for death in deaths if death.exit_code < 0 or death.rank not in reported]
    if unexplained:
        first = min(unexplained, key=lambda death: _rank_death(death, logs_dir))
        return Cause(_describe_death(first, logs_dir), Likelihood.DEATH, first.time)
    if reports:
        gone = sorted(set(silent) - {death.rank for death in deaths})
        return _describe_echo(reports[0], gone, logs_dir)
    return Cause(Outcome(DONE), Likelihood.NOTHING, time.time())


def _describe_echo(report: RankOutcome, gone: Sequence[int], logs_dir: Path) -> Cause:
    """The cause if all reports only mean that a peer is gone. `gone`: ranks that exited with code 0 and no report."""
    if not gone:
        return Cause(Outcome(report.code, report.message), Likelihood.ECHO, report.time)
    return Cause(describe_silent(gone[0], logs_dir), Likelihood.DEATH, report.time)


def describe_silent(rank: int, logs_dir: Path) -> Outcome:
    """The outcome of a rank that exited with code 0 and no report, as by `os._exit(0)`."""
    log = logs_dir / f"rank-{rank:05d}.log"
    return Outcome(FAILED, f"rank {rank} exited with code 0 before the run had ended; see {log}")


def _find_accident(deaths: Sequence[ProcessDeath], first_cause_time: float) -> ProcessDeath | None:
    """The first process killed by a signal that neither agents nor collectives send, before the agent's SIGKILL."""
    until = first_cause_time + _KILLED_BY_AGENT_SECONDS
    expected = (-signal.SIGTERM, -signal.SIGABRT)
    return next(
        (death for death in deaths if death.exit_code < 0 and death.exit_code not in expected and death.time < until),
        None,
    )


def _describe_death(death: ProcessDeath, logs_dir: Path) -> Outcome:
    log = logs_dir / f"rank-{death.rank:05d}.log"
    hint = " (often because the machine ran out of memory)" if death.exit_code == -signal.SIGKILL else ""
    if reason := _find_abort_reason(death, logs_dir):
        hint = f": {explain_open_files(RuntimeError(reason)) or reason}"
    return Outcome(FAILED, f"rank {death.rank} (pid {death.pid}) {describe_ending(death)}{hint}; see {log}")


def _rank_death(death: ProcessDeath, logs_dir: Path) -> tuple[bool, bool, bool, float]:
    """Return what sorts deaths by how likely they are the cause: an abort, an exit code, any other signal.

    NCCL also aborts the peers of the rank that has failed, and says so.
    """
    is_echo = _PEER_VANISHED.search(_find_abort_reason(death, logs_dir)) is not None
    return death.exit_code != -signal.SIGABRT, death.exit_code < 0, is_echo, death.time


def _find_abort_reason(death: ProcessDeath, logs_dir: Path) -> str:
    """Return why a thread of NCCL or gloo has aborted this process, as the end of its log says; empty if none has."""
    if death.exit_code != -signal.SIGABRT:
        return ""
    try:
        with open_regular(logs_dir / f"rank-{death.rank:05d}.log") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            reasons = _ABORTED.findall(log.read(_LAST_BYTES))
    except OSError:
        return ""
    return b"".join(reasons[-1]).decode(errors="replace").strip(". \r")[:_REASON_LENGTH] if reasons else ""


def describe_ending(death: ProcessDeath) -> str:
    """How a process ended, as the end of a sentence about it."""
    if death.exit_code == MACHINE_LOST:
        return "was lost with its machine"
    if death.exit_code < 0:
        return f"was killed by {_name_signal(-death.exit_code)}"
    return f"exited with code {death.exit_code}"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(rank: int, code: int, message: str, secondary: bool = False, final: bool = False) -> RankOutcome:
    """A report with the current time."""
    return RankOutcome(rank, code, message, time.time(), secondary, final)
