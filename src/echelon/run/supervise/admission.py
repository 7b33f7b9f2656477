"""What machines report before they take part in an attempt, and what is wrong with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median

from echelon.planner.hardware.health import Health
from echelon.recipe.operation import FaultConfig

# Of a device against the median of the other machines' devices of that name.
_SLOW = 0.5
# Deaths on different machines are put in order by their times, and a shared folder's files are compared by theirs.
_CLOCK_SECONDS = 2.0


class Severity(IntEnum):
    """What a problem of a machine entails."""

    NAMED = 0
    """It is named."""
    LEFT_OUT = 1
    """The machine is left out if enough others are there, and else takes part."""
    ENDS = 2
    """The machine is left out if enough others are there, and else the job ends."""
    REFUSES = 3
    """The same; the request cannot be met by this machine."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a machine, a sentence with the fix."""

    words: str
    severity: int = Severity.ENDS


@dataclass(frozen=True)
class MachineReport:
    """What a machine knows of itself before it takes part.

    Attributes:
        problems: those it knows.
        num_processes: how many ranks it starts.
        name: that by which the machines are ordered, and so their ranks.
        rates: FLOP/s and bytes/s by kind, as of `Health`.
        clock: the seconds that its clock is ahead of the coordinator's, at least and at most.
    """

    problems: tuple[Problem, ...] = ()
    num_processes: int = 1
    name: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    clock: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def of(health: Health, missing: str | None, fault: FaultConfig, num_processes: int, name: str) -> "MachineReport":
        """The condition of this machine. `missing`: the message if it lacks GPUs that its job asked for."""
        severity = Severity.ENDS if fault.on_bad_machine == "leave_out" else Severity.NAMED
        problems = [Problem(words, severity) for words in health.faults]
        problems += [Problem(words, _slow_severity(fault)) for words in health.slowdowns]
        if missing is not None:
            problems.insert(0, Problem(missing.rstrip("."), Severity.REFUSES))
        return MachineReport(tuple(problems), num_processes, name, health.rates)


def judge(conditions: Mapping[str, MachineReport], fault: FaultConfig) -> dict[str, list[Problem]]:
    """The problems of each machine: those it knows, and those that show when it is compared with the others."""
    problems = {host: list(condition.problems) for host, condition in conditions.items()}
    for host, words in _compare_clocks(conditions).items():
        severity = Severity.LEFT_OUT if fault.on_bad_machine == "leave_out" else Severity.NAMED
        problems[host].append(Problem(words, severity))
    for kind in {kind: None for condition in conditions.values() for kind in condition.rates}:
        rates = {host: condition.rates[kind] for host, condition in conditions.items() if kind in condition.rates}
        suspects = [host for host, rate in rates.items() if rate < _SLOW * max(rates.values())]
        for host in suspects:
            usual = median(rate for other, rate in rates.items() if other != host)
            if rates[host] < _SLOW * usual:
                words = f"it is slow ({kind}): {rates[host]:.3g} per second, and the other machines {usual:.3g}"
                problems[host].append(Problem(words, _slow_severity(fault)))
    return problems


def _compare_clocks(conditions: Mapping[str, MachineReport]) -> dict[str, str]:
    """The machines whose clock certainly differs from that of most others, or of the coordinator if none is usual."""

    def differ(usual: float) -> dict[str, float]:
        gaps = {host: max(c.clock[0] - usual, usual - c.clock[1], 0.0) for host, c in conditions.items()}
        return {host: gap for host, gap in gaps.items() if gap > _CLOCK_SECONDS}

    if not differ(0.0):
        return {}
    candidates = [0.0, *(sum(condition.clock) / 2 for condition in conditions.values())]
    odd = min(map(differ, candidates), key=len)  # the first of several: the coordinator's
    return {
        host: f"its clock differs from the others by {gap:.1f} s; set it with NTP: start chrony or systemd-timesyncd"
        for host, gap in odd.items()
    }


def _slow_severity(fault: FaultConfig) -> Severity:
    return Severity.LEFT_OUT if fault.on_straggler == "stop" else Severity.NAMED
