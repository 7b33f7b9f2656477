"""Admission of machines to an attempt: each presents its condition, and the coordinator says who takes part.

A bad machine is left out where enough others are there, so that it does not fail, or slow down, the whole job. Machines
beyond the number that trains are spares: they wait for the next attempt, in which they take the places of lost ones.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from statistics import median

from echelon.ground.foreign_launchers import in_number_order
from echelon.planner.hardware.health import Health
from echelon.recipe.operation import FaultConfig
from echelon.run.supervise.agent_votes import Watch
from echelon.run.supervise.outcome import DONE, FAILED, REFUSED, Cause, Likelihood, Outcome

logger = logging.getLogger(__name__)

# Of a device against the median of the other machines' devices of that name.
_SLOW = 0.5
# Deaths on different machines are put in order by their times, and a shared folder's files are compared by theirs.
_CLOCK_SECONDS = 2.0
_LOOK_SECONDS = 0.05
# How long the first machines of an elastic job wait for others; and how long if too few of them are without a fault.
_LAST_CALL_SECONDS, _HEALTHY_SECONDS = 5.0, 30.0


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


@dataclass(frozen=True)
class AdmissionResult:
    """The coordinator's answer to a machine: whether it takes part; if the attempt `ends`, the message and the code.

    `is_spare`: whether it waits for the next attempt.
    """

    is_admitted: bool
    words: str = ""
    ends: bool = False
    code: int = FAILED
    is_spare: bool = False

    @property
    def cause(self) -> Cause:
        """How the attempt ends on this machine, which takes no part; a cause of nothing if it came too late."""
        if self.code == DONE:
            return Cause(Outcome(DONE), Likelihood.NOTHING, time.time())
        return Cause(Outcome(self.code, self.words, final=True), Likelihood.CAUSE, time.time())


def judge(conditions: Mapping[str, MachineReport], fault: FaultConfig) -> dict[str, list[Problem]]:
    """The problems of each machine: those it knows, and those that show when it is compared with the others."""
    problems = {host: list(condition.problems) for host, condition in conditions.items()}
    for host, words in _compare_clocks(conditions).items():
        severity = Severity.LEFT_OUT if fault.on_bad_machine == "leave_out" else Severity.NAMED
        problems[host].append(Problem(words, severity))
    for host, condition in conditions.items():
        for kind, rate in condition.rates.items():
            others = [other.rates[kind] for name, other in conditions.items() if name != host and kind in other.rates]
            if others and rate < _SLOW * (usual := median(others)):
                words = f"it is slow ({kind}): {rate:.3g} per second, and the other machines {usual:.3g}"
                problems[host].append(Problem(words, _slow_severity(fault)))
    return problems


def _compare_clocks(conditions: Mapping[str, MachineReport]) -> dict[str, str]:
    """The machines whose clock certainly differs from that of most others, or of the coordinator if none is usual."""

    def differ(usual: float) -> dict[str, float]:
        gaps = {host: max(c.clock[0] - usual, usual - c.clock[1], 0.0) for host, c in conditions.items()}
        return {host: gap for host, gap in gaps.items() if gap > _CLOCK_SECONDS}

    candidates = [0.0, *(sum(condition.clock) / 2 for condition in conditions.values())]
    odd = min(map(differ, candidates), key=len)  # the first of several: the coordinator's
    return {
        host: f"its clock differs from the others by {gap:.1f} s; set it with NTP: start chrony or systemd-timesyncd"
        for host, gap in odd.items()
    }


def _slow_severity(fault: FaultConfig) -> Severity:
    return Severity.LEFT_OUT if fault.on_straggler == "stop" else Severity.NAMED


class Admission:
    """The admission to one attempt, through the store of the agents. Each thread needs one of its own."""

    def __init__(self, watch: Watch, fault: FaultConfig) -> None:
        self._watch = watch
        self._fault = fault
        self._enough_since: float | None = None
        self._lost: set[str] = set()

    def present(self, condition: MachineReport) -> AdmissionResult:
        """Present this machine, and wait for the answer. It has joined the attempt. Raises DistError as a Meeting."""
        watch = self._watch
        if not watch.coordinates:
            if (clock := self._measure_clock()) is None:
                return AdmissionResult(False, ends=True, code=DONE)
            condition = replace(condition, clock=clock)
        watch.store.set(self._key("condition", watch.host), json.dumps(asdict(condition)))
        if not self._await(key := self._key("answer", watch.host)):
            return AdmissionResult(False, ends=True, code=DONE)
        return AdmissionResult(**json.loads(watch.store.get(key)))

    def await_team(self) -> list[tuple[str, int]] | None:
        """Wait for who trains in this attempt, see `Watch.form_team`; None if the attempt is over before."""
        while (team := self._watch.find_team()) is None:
            if self._watch.is_closed():
                return None
            time.sleep(_LOOK_SECONDS)
        return team

    def look(self) -> None:
        """On the coordinator, now and then during the whole attempt: answer those who wait, if it can be decided."""
        if not self._watch.coordinates:
            return
        self._tell_lost_spares()
        hosts = self._watch.hosts()
        for host in hosts:
            if self._has("ping", host) and not self._has("pong", host):
                self._watch.store.set(self._key("pong", host), str(time.time()))
        conditions = {host: self._read(host) for host in hosts if self._has("condition", host)}
        waiting = [host for host in conditions if not self._has("answer", host)]
        is_present = self._watch.host in conditions or self._watch.host not in hosts
        if waiting and is_present:  # this machine trains, if it can, whoever comes first
            self._decide(conditions, waiting)

    def _tell_lost_spares(self) -> None:
        """Look at the spares all the time: one counts as lost only if it was looked at before."""
        spares = self._watch.spares()
        lost = {host for host in spares if self._watch.is_silent(host)}
        for host in sorted(lost - self._lost):
            logger.warning(f"the spare {host} stopped responding; spares left: {len(spares) - len(lost)}")
        self._lost |= lost

    def _decide(self, conditions: Mapping[str, MachineReport], waiting: Sequence[str]) -> None:
        problems = judge(conditions, self._fault)
        worst = {host: max((p.severity for p in of_host), default=Severity.NAMED) for host, of_host in problems.items()}
        taken = [host for host in conditions if worst[host] == Severity.NAMED and not self._watch.is_silent(host)]
        group, is_formed = self._watch.group, self._watch.find_team() is not None
        if len(taken) < group.min_nodes:
            if self._expects_more(len(conditions), group.max_machines, _HEALTHY_SECONDS):
                return
            taken = [host for host in conditions if worst[host] < Severity.ENDS]
        elif (
            group.is_elastic
            and not is_formed
            and self._expects_more(len(conditions), group.max_nodes, _LAST_CALL_SECONDS)
        ):
            return
        if len(taken) < group.min_nodes:
            ending = self._describe_ending(problems)
            for host in waiting:
                self._answer(host, ending)
            return
        team = self._choose_team(taken)
        if not is_formed and not group.lives_on:
            order = sorted(team, key=lambda host: (host != self._watch.host, *in_number_order(conditions[host].name)))
            self._watch.form_team([(host, conditions[host].num_processes) for host in order])
        self._take(taken, team, waiting, problems)
        if is_formed and group.is_elastic and len(team) < group.max_nodes and set(waiting) & set(taken):
            self._watch.meet_again()

    def _choose_team(self, fit: Sequence[str]) -> list[str]:
        """Of the machines that could take part, those that do; once ranks run no other one, until all meet again.

        Those that were spares before are so again if possible. Where processes live on, all take part: their keeper
        gives a machine that comes later the place of a lost one.
        """
        watch = self._watch
        if watch.group.lives_on:
            return list(fit)
        if (team := watch.find_team()) is not None:
            return [host for host, _ in team]
        return sorted(fit, key=lambda host: (host != watch.host, watch.was_spare(host)))[: watch.group.max_nodes]

    def _take(
        self,
        taken: Sequence[str],
        team: Sequence[str],
        waiting: Sequence[str],
        problems: Mapping[str, Sequence[Problem]],
    ) -> None:
        """Answer those who wait: of the machines that are taken, some are spares; the others are left out."""
        for host in waiting:
            words = "; ".join(problem.words for problem in problems[host])
            if host in taken and host not in team:
                logger.info(f"machine {host} {'is a spare' if self._watch.group.num_spares else 'joins'}")
                self._watch.hold(host)
                self._answer(host, AdmissionResult(False, is_spare=True))
                continue
            if host not in taken:
                logger.warning(f"machine {host} is left out: {words}")
            elif words:
                logger.warning(f"machine {host}: {words}")
            if host in taken and self._watch.group.num_spares and self._watch.was_spare(host):
                logger.info(f"machine {host}, a spare, takes the place of another one")
            self._answer(host, AdmissionResult(host in taken, words))

    def _expects_more(self, count: int, most: int, seconds: float) -> bool:
        """Whether enough machines are not there yet, or more may come some time after that."""
        now = time.monotonic()
        if count < self._watch.group.min_nodes:
            self._enough_since = None
            return True
        self._enough_since = now if self._enough_since is None else self._enough_since
        return count < most and now - self._enough_since < seconds

    def _describe_ending(self, problems: Mapping[str, Sequence[Problem]]) -> AdmissionResult:
        """Why the job ends on all machines: too few are left without the bad ones."""
        refused = [p.words for of_host in problems.values() for p in of_host if p.severity == Severity.REFUSES]
        if refused:
            return AdmissionResult(False, f"{refused[0]}.", True, REFUSED)
        bad = [
            f"machine {host}: {problem.words}"
            for host, of_host in problems.items()
            for problem in of_host
            if problem.severity == Severity.ENDS
        ]
        least = self._watch.group.min_nodes
        remedy = f"start again with {least} others, or set fault.on_bad_machine=warn to train all the same"
        return AdmissionResult(False, f"{'; '.join(bad)}; {remedy}", True)

    def _answer(self, host: str, answer: AdmissionResult) -> None:
        if not answer.is_admitted and not answer.ends:
            self._watch.leave_out(host)
        self._watch.store.set(self._key("answer", host), json.dumps(asdict(answer)))

    def _measure_clock(self) -> tuple[float, float] | None:
        """The bounds of this clock's lead over the coordinator's, which reads its own between two readings of this.

        None if the attempt is over.
        """
        store, host = self._watch.store, self._watch.host
        before = time.time()
        store.set(self._key("ping", host), "")
        if not self._await(key := self._key("pong", host)):
            return None
        after, there = time.time(), float(store.get(key))
        return before - there, after - there

    def _read(self, host: str) -> MachineReport:
        fields = json.loads(self._watch.store.get(self._key("condition", host)))
        low, high = fields["clock"]
        problems = tuple(Problem(**problem) for problem in fields["problems"])
        return MachineReport(**{**fields, "problems": problems, "clock": (low, high)})

    def _has(self, word: str, host: str) -> bool:
        return self._watch.store.check([self._key(word, host)])

    def _await(self, key: str) -> bool:
        """Wait for a key; False if the attempt is over before it is there."""
        while not self._watch.store.check([key]):
            if self._watch.is_closed():
                return self._watch.store.check([key])
            time.sleep(_LOOK_SECONDS)
        return True

    def _key(self, word: str, host: str) -> str:
        return f"{self._watch.attempt}/{word}/{host}"
