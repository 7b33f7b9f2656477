"""How the ranks of a job ended, reduced to one exit code and one message.

Each worker writes `rank-N.json` before it leaves. When one rank fails the others soon fail too, because a peer
vanished; the message must come from the first, so a report says whether it is only such an echo.
"""

import json
import math
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path

from echelon.errors import ConfigError, DataError, EchelonError, LaunchError, PlanError
from echelon.stored import read_as, write_json, write_text

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 3

# The agent kills a worker that outlives its SIGTERM by more than this many seconds: such a death explains nothing.
_KILLED_BY_AGENT_SECONDS = 5.0

_REPORT_BYTES = 4096

# What gloo, NCCL and the store say when the process at the other end is gone.
_PEER_VANISHED = re.compile(
    r"connection closed by peer|connection reset|broken pipe|connection refused|read error|socket closed"
    r"|unexpected EOF|remote (process|peer|error)|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|failed to recv|recvValue failed|sendBytes failed|recv, got 0 bytes|connectFullMesh failed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """How a job, or one command, ended: the exit code of the contract, and the message to show.

    `final`: a new start would end in the same way.
    """

    code: int
    message: str = ""
    final: bool = False


@dataclass(frozen=True)
class RankOutcome:
    """What a rank reported: its exit code, its message, when (UTC seconds), whether it only echoes a peer, and whether
    it is final: a new start would end in the same way.
    """

    rank: int
    code: int
    message: str
    time: float
    secondary: bool = False
    final: bool = False


@dataclass(frozen=True)
class ProcessDeath:
    """What the agent saw: a process that left with a code other than 0, or by a signal (negative)."""

    rank: int
    pid: int
    exit_code: int
    time: float


def is_secondary(error: BaseException) -> bool:
    """Whether the error only says that a peer is gone, which that peer's own report explains better."""
    if isinstance(error, ConfigError | PlanError | DataError | LaunchError):
        return False
    if isinstance(error, RuntimeError | ConnectionError) and _PEER_VANISHED.search(str(error)):
        return True
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and is_secondary(cause)


def is_final(error: BaseException) -> bool:
    """Whether a new start from the newest checkpoint would end in the same error: one that echelon raised by itself.

    Steps repeat bit for bit, so a loss that is not finite comes back, and a full disk stays full. Only a meeting of
    ranks that failed may succeed another time.
    """
    return isinstance(error, EchelonError) and not isinstance(error, LaunchError) and not is_secondary(error)


def reserve_outcome(directory: Path, rank: int) -> None:
    """Reserve disk space for a report in advance: it may have to say that the disk is full."""
    write_text(directory / f"rank-{rank}.json", " " * _REPORT_BYTES)


def write_outcome(directory: Path, outcome: RankOutcome) -> None:
    """Report how this rank ended; on a full disk, in the space that `reserve_outcome` reserved."""
    path = directory / f"rank-{outcome.rank}.json"
    try:
        write_json(path, asdict(outcome))
    except OSError:
        shortened = replace(outcome, message=outcome.message[: _REPORT_BYTES // 8])
        with path.open("r+b") as file:
            file.write(json.dumps(asdict(shortened)).encode().ljust(_REPORT_BYTES))


def read_outcomes(directory: Path) -> list[RankOutcome]:
    """The reports there are, by rank; a report that cannot be read counts as absent."""
    outcomes = []
    for path in directory.glob("rank-*.json"):
        try:
            outcomes.append(read_as(path, RankOutcome))
        except (OSError, ValueError):
            continue
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def is_peer_leaving(directory: Path) -> bool:
    """Whether a rank was refused or stopped after a save: then its peers' errors are no failure to restart from."""
    return any(each.code in (REFUSED, STOPPED) and not each.secondary for each in read_outcomes(directory))


class Weight(IntEnum):
    """How much an outcome explains, the cause first: of several outcomes, the smallest is the cause of the others."""

    CAUSE = 0
    DEATH = 1
    ECHO = 2
    NOTHING = 3


@dataclass(frozen=True)
class Cause:
    """What ended a group of ranks, when (UTC seconds), and how much that explains."""

    outcome: Outcome
    weight: Weight
    time: float


def find_cause(outcomes: Sequence[RankOutcome], deaths: Sequence[ProcessDeath], logs_dir: Path) -> Cause:
    """What ended these ranks first.

    In this order: a process killed by a signal that nobody sends on purpose; the earliest report that is not an echo;
    an abort (also what a collective does when its peer dies); a process that left without a report; one ended by
    SIGTERM; an echo.
    """
    reports = sorted((each for each in outcomes if each.code != DONE), key=lambda each: each.time)
    cause = next((each for each in reports if not each.secondary), None)
    accident = _find_accident(deaths, math.inf if cause is None else cause.time)
    if accident is not None:
        return Cause(_describe_death(accident, logs_dir), Weight.CAUSE, accident.time)
    if cause is not None:
        return Cause(Outcome(cause.code, cause.message, cause.final), Weight.CAUSE, cause.time)
    reported = {each.rank for each in reports}
    unexplained = [each for each in deaths if each.exit_code < 0 or each.rank not in reported]
    if unexplained:
        # An abort explains more than an exit code, and that more than any other signal.
        first = min(unexplained, key=lambda each: (each.exit_code != -signal.SIGABRT, each.exit_code < 0))
        return Cause(_describe_death(first, logs_dir), Weight.DEATH, first.time)
    if reports:
        return Cause(Outcome(reports[0].code, reports[0].message), Weight.ECHO, reports[0].time)
    return Cause(Outcome(DONE), Weight.NOTHING, time.time())


def _find_accident(deaths: Sequence[ProcessDeath], first_cause_time: float) -> ProcessDeath | None:
    """The first process killed by a signal that neither an agent nor a collective sends, before the agent did."""
    until = first_cause_time + _KILLED_BY_AGENT_SECONDS
    expected = (-signal.SIGTERM, -signal.SIGABRT)
    return next(
        (each for each in deaths if each.exit_code < 0 and each.exit_code not in expected and each.time < until), None
    )


def _describe_death(death: ProcessDeath, logs_dir: Path) -> Outcome:
    log = logs_dir / f"rank-{death.rank:05d}.log"
    if death.exit_code < 0:
        ending = f"was killed by {_name_signal(-death.exit_code)}"
    else:
        ending = f"exited with code {death.exit_code}"
    hint = " (often because the machine ran out of memory)" if death.exit_code == -signal.SIGKILL else ""
    return Outcome(FAILED, f"rank {death.rank} (pid {death.pid}) {ending}{hint}; see {log}")


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(rank: int, code: int, message: str, secondary: bool = False, final: bool = False) -> RankOutcome:
    """A report with the current time."""
    return RankOutcome(rank, code, message, time.time(), secondary, final)
