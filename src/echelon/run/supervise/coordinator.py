"""What the coordinator of a job says, by what machines report: who takes part in an attempt, and what all do after it.

A bad machine is left out where enough others are there, so that it does not fail, or slow down, the whole job. Machines
beyond the number that trains are spares: they wait for the next attempt, in which they take the places of lost ones. So
does a machine that joins an elastic job, for which all others save and meet again.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from statistics import median
from typing import Any

from echelon.ground.foreign_launchers import in_number_order
from echelon.ground.hosts import HostGroup
from echelon.ground.stored import validator_of
from echelon.planner.hardware.health import Health
from echelon.recipe.operation import FaultConfig
from echelon.run.supervise.decision import Decision, HostReport, Restarts, decide
from echelon.run.supervise.hangs import Waiting
from echelon.run.supervise.outcome import FAILED, REFUSED, Likelihood, RankExit

logger = logging.getLogger(__name__)

# Of a device against the median of the other machines' devices of that name.
_SLOW = 0.5
# Deaths on different machines are put in order by their times, and a shared folder's files are compared by theirs.
_CLOCK_SECONDS = 2.0

Message = Mapping[str, Any]
"""What an agent posts, or the coordinator publishes: JSON, with its `kind` and the number of its `attempt`."""

# The kinds of messages that all machines get as they are, and those of which they get one alone, of another kind.
_RELAYED = ("call", "members", "exit", "awaits")
_TOLD_ONCE = {"closing": "is_closed", "death": "is_dead"}

# How long the first machines of an elastic job wait for others, and all for those that have trained in the attempt
# before; and how long if too few of them are without a fault.
_LAST_CALL_SECONDS, _HEALTHY_SECONDS = 5.0, 30.0
# How much later a stop may reach another machine of the job, and its ranks may notice a hang.
_ASKING_SECONDS, _NOTICE_SECONDS = 1.5, 5.0
# Between two log lines about machines that have not come yet.
_WAITING_SECONDS = 20.0


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


@dataclass
class AttemptNews:
    """What the coordinator has said of an attempt.

    Attributes:
        team: the machines that take part, with their numbers of ranks, in the order of the ranks.
        spares: those that wait for the next attempt.
        left_out: why others take no part.
        call: where the ranks meet, or the store of their keeper, in JSON.
        keeper: the machine of that store.
        members: where processes live on, the one that each rank is to be, and its machine; None: none.
        exits: how such processes have ended.
        awaits: whether the others wait for one of them that starts again.
        lost: the machines that are lost, where the others go on.
        is_dead: whether a machine has lost a rank, or is itself lost.
        meets_again: whether all save, stop and meet again, because a machine joins.
        is_closed: whether it has ended on a machine, so that nobody else begins.
        leaving: slow machines that a spare replaces.
        waiting: what the ranks of all machines say in a long wait.
        decision: what all do next.
    """

    team: list[tuple[str, int]] | None = None
    spares: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    call: str | None = None
    keeper: str | None = None
    members: dict[int, tuple[str, str] | None] = field(default_factory=dict)
    exits: list[RankExit] = field(default_factory=list)
    awaits: bool = False
    lost: set[str] = field(default_factory=set)
    is_dead: bool = False
    meets_again: bool = False
    is_closed: bool = False
    leaving: list[str] = field(default_factory=list)
    waiting: Waiting | None = None
    decision: Decision | None = None

    def take(self, message: Message) -> None:
        """Take in one message."""
        if message["kind"] == "answers":
            self.team = [(host, count) for host, count in message["team"]]
            self.spares = [host for host in (*self.spares, *message["spares"]) if not self.takes_part(host)]
            self.left_out |= message["left_out"]
        elif message["kind"] == "call":
            self.call, self.keeper = message["words"], message["host"]
        elif message["kind"] == "members":
            self.members = self.members | {rank: member and tuple(member) for rank, member in message["members"]}
        elif message["kind"] == "exit":
            self.exits.append(validator_of(RankExit).validate_python(message["exit"]))
        elif message["kind"] == "lost":
            self.lost = self.lost | set(message["hosts"])
        elif message["kind"] == "leave":
            self.leaving.append(message["host"])
        elif message["kind"] == "waiting":
            self.waiting = validator_of(Waiting).validate_python(message["waiting"])
        elif message["kind"] == "decision":
            self.decision = validator_of(Decision).validate_python(message["decision"])
        elif message["kind"] in ("is_dead", "meets_again", "is_closed", "awaits"):
            setattr(self, message["kind"], message.get("is_so", True))

    @property
    def is_over(self) -> bool:
        """Whether nobody else begins."""
        return self.is_closed or self.decision is not None

    def takes_part(self, host: str) -> bool:
        """Whether a machine takes part."""
        return self.team is not None and any(host == other for other, _ in self.team)


class Coordinator:
    """Handles the messages of all machines, and publishes what they do. Not for use by several threads."""

    def __init__(
        self,
        host: str,
        group: HostGroup,
        restarts: Restarts,
        fault: FaultConfig,
        publish: Callable[[Message], None],
    ) -> None:
        """`host`: this machine's name. `publish`: tells all."""
        self._host = host
        self._group = group
        self._restarts = restarts
        self._fault = fault
        self._publish = publish
        self._silent = frozenset[str]()
        self._asked = set[str]()
        self._lost_spares = set[str]()
        self._readers: set[str] | None = None
        self._begin(0, AttemptNews())

    def _begin(self, attempt: int, last: AttemptNews) -> None:
        """Begin an attempt. `last`: the news of the one before."""
        leaving = last.decision.leaving if last.decision is not None else ()
        self._last_step = last.decision.step if last.decision is not None else None
        self._attempt = attempt
        self._last_spares = last.spares
        self._last_team = {host for host, _ in last.team or ()} - set(leaving)
        self._reports: dict[str, MachineReport] = {}
        self._waiting: list[str] = []
        self._team: list[tuple[str, int]] = [(self._host, 1)] if self._group.is_alone else []
        self._spares: list[str] = []
        self._left_out = set[str]()
        self._ended: dict[str, HostReport] = {}
        self._told, self._told_lost, self._has_lost_keeper = set[str](), set[str](), False
        self._waits_of: dict[str, Waiting] = {}
        self._told_waiting = Waiting()
        self._hanging_since: float | None = None
        self._enough_since: float | None = None
        self._complete_at: float | None = None
        self._next_line_at = time.monotonic() + _WAITING_SECONDS

    def restore(self, news: Mapping[int, AttemptNews]) -> None:
        """Go on where a lost coordinator has stopped: with all that it has said. All messages to it follow again."""
        attempt = 0
        while (decision := news.get(attempt, AttemptNews()).decision) is not None and decision.goes_on:
            attempt += 1
            self._restarts.done = decision.restarts
        self._begin(attempt, news.get(attempt - 1, AttemptNews()))
        said = news.get(attempt, AttemptNews())
        self._team, self._spares, self._left_out = list(said.team or ()), list(said.spares), set(said.left_out)
        self._told_lost, self._has_lost_keeper = set(said.lost), said.keeper is not None
        self._told = {kind for kind in ("is_dead", "meets_again", "is_closed") if getattr(said, kind)}
        if said.decision is not None:
            self._readers = set()

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self._readers is not None

    def hosts(self) -> set[str]:
        """The machines that are known in this attempt."""
        past = {*self._last_team, *self._last_spares}
        return {*self._reports, *self._spares, *past, *(host for host, _ in self._team)}

    def awaits_readers(self) -> bool:
        """Whether a machine has not read yet that the job has ended."""
        return self._readers is not None and bool(self._readers - self._silent)

    def handle(self, message: Message) -> None:
        """Take in the message of a machine; what is due follows in `look`."""
        kind, host = message["kind"], message.get("host", "")
        if kind == "asked":
            self._asked.add(host)
            if not self._group.may_leave:
                self._publish({"kind": "stop", "name": message["name"]})
        elif kind == "read":
            (self._readers or set()).discard(host)
        elif message["attempt"] == self._attempt and self._readers is None:
            self._take(kind, host, message)

    def _take(self, kind: str, host: str, message: Message) -> None:
        """Take in a message about the current attempt."""
        if kind in _RELAYED:
            self._publish(message)
        elif kind in _TOLD_ONCE:
            self._tell_once(_TOLD_ONCE[kind])
        elif kind == "present":
            self._take_report(host, message)
        elif kind == "ended":
            self._take_end(host, message)
        elif kind == "waiting":
            self._waits_of[host] = validator_of(Waiting).validate_python(message["waiting"])
        elif kind == "slow":
            self._take_slow(message)

    def _take_report(self, host: str, message: Message) -> None:
        self._reports[host] = validator_of(MachineReport).validate_python(message["report"])
        if host not in {*self._spares, *self._left_out, *(member for member, _ in self._team)}:
            self._waiting.append(host)

    def _take_end(self, host: str, message: Message) -> None:
        if any(host == member for member, _ in self._team):
            self._ended[host] = validator_of(HostReport).validate_python(message["report"])
            if host == self._host or not self._group.lives_on:
                self._tell_once("is_closed")

    def _take_slow(self, message: Message) -> None:
        """Let the machine of a slow rank leave if a spare waits; not this one, whose end may be that of the job."""
        host = [member for member, count in self._team for _ in range(count)][message["rank"]]
        if host != self._host and set(self._spares) - self._silent:
            self._tell("leave", host=host)

    def look(self, silent: frozenset[str]) -> None:
        """Do what is due. Call it now and then, and after messages. `silent`: the machines that are lost."""
        self._silent = silent
        if self._readers is not None:
            return
        self._tell_lost_spares()
        if self._waiting and (self._host in self._reports):  # this machine trains, if it can, whoever comes first
            self._admit()
        self._tell_missing()
        self._tell_waiting()
        if any(host in silent for host, _ in self._team):
            self._handle_losses()
        if self._team and self._readers is None and self._has_ended():
            self._decide()
        elif not self._team and self._readers is None:
            self._end_short()

    def _tell(self, kind: str, **fields: Any) -> None:
        self._publish({"kind": kind, "attempt": self._attempt, **fields})

    def _tell_once(self, kind: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(kind)

    def _tell_missing(self) -> None:
        if not self._team and time.monotonic() > self._next_line_at:
            self._next_line_at += _WAITING_SECONDS
            needed = self._group.min_nodes
            logger.info(f"waiting for machines: {len(self._reports)} of {needed} have joined")

    def _tell_waiting(self) -> None:
        """Tell what the ranks of all machines say, if it has changed; who has not noticed a hang, after a moment."""
        rests = [wait.resting for wait in self._waits_of.values() if wait.resting is not None]
        late = next((wait.late for wait in self._waits_of.values() if wait.late is not None), None)
        noticed = {rank for wait in self._waits_of.values() for rank in wait.hanging}
        missing = None
        if noticed:
            now = time.monotonic()
            self._hanging_since = now if self._hanging_since is None else self._hanging_since
            left = sorted(set(range(sum(count for _, count in self._team))) - noticed)
            if not left or now - self._hanging_since > _NOTICE_SECONDS:
                missing = tuple(left)
        waiting = Waiting(min(rests, default=None), late, missing=missing)
        if waiting != self._told_waiting:
            self._told_waiting = waiting
            self._tell("waiting", waiting=asdict(waiting))

    def _tell_lost_spares(self) -> None:
        lost = set(self._spares) & self._silent
        for host in sorted(lost - self._lost_spares):
            logger.warning(f"the spare {host} stopped responding; spares left: {len(self._spares) - len(lost)}")
        self._lost_spares |= lost

    def _admit(self) -> None:
        """Answer the machines that wait, if it can be decided."""
        group = self._group
        if len(self._reports) < group.min_nodes or self._expects_others():
            return
        problems = judge(self._reports, self._fault)
        fit = self._find_fit(problems)
        if len(fit) < group.min_nodes and not self._may_be_more():
            self._end(self._describe_ending(problems))
        if len(fit) < group.min_nodes:
            return
        if not self._team:
            self._team = self._choose_team(fit)
        self._answer(fit, problems)
        if group.is_elastic and self._spares and len(self._team) < group.max_nodes:
            self._tell_once("meets_again")

    def _find_fit(self, problems: Mapping[str, Sequence[Problem]]) -> list[str]:
        """The machines that can take part: those without a problem, or some with one if too few are left."""
        worst = {host: max((p.severity for p in of_host), default=Severity.NAMED) for host, of_host in problems.items()}
        fit = [host for host in self._reports if worst[host] == Severity.NAMED and host not in self._silent]
        if len(fit) >= self._group.min_nodes or self._may_be_more():
            return fit
        return [host for host in self._reports if worst[host] < Severity.ENDS]

    def _may_be_more(self) -> bool:
        """Whether more machines may come, in the place of bad ones."""
        return len(self._reports) < self._group.max_machines and self._waits(_HEALTHY_SECONDS)

    def _expects_others(self) -> bool:
        """Whether others may still come before ranks start: those that have trained before, or more of a range."""
        is_back = self._last_team <= self._reports.keys() | self._silent
        is_full = not self._group.is_elastic or len(self._reports) >= self._group.max_nodes
        return not self._team and not (is_back and is_full) and self._waits(_LAST_CALL_SECONDS)

    def _waits(self, seconds: float) -> bool:
        """Whether there have been enough machines for less than this time."""
        now = time.monotonic()
        self._enough_since = now if self._enough_since is None else self._enough_since
        return now - self._enough_since < seconds

    def _choose_team(self, fit: Sequence[str]) -> list[tuple[str, int]]:
        """Of the machines that could take part, those that do, in the order of their ranks: the coordinator's first.

        Those that were spares before are so again if possible.
        """
        chosen = sorted(fit, key=lambda host: (host != self._host, host in self._last_spares))
        del chosen[self._group.max_nodes :]
        chosen.sort(key=lambda host: (host != self._host, *in_number_order(self._reports[host].name)))
        return [(host, self._reports[host].num_processes) for host in chosen]

    def _handle_losses(self) -> None:
        """End the attempt because machines are lost, or where the others go on say which, and replace them.

        The store of the keeper is lost with its machine, so this attempt is not to be saved.
        """
        if not self._group.lives_on:
            self._tell_once("is_dead")
            return
        lost = {host for host, _ in self._team} & self._silent - self._told_lost
        if lost:
            self._told_lost |= lost
            self._tell("lost", hosts=sorted(lost))
        if self._has_lost_keeper:
            self._tell_once("is_closed")
        else:
            self._replace_lost()

    def _replace_lost(self) -> None:
        """Give the places of lost machines to spares."""
        ready = [host for host in self._spares if host not in self._silent]
        if not ready:
            return
        for index, (host, count) in enumerate(self._team):
            if host in self._told_lost and ready:
                logger.info(f"machine {ready[0]} takes the place of {host}")
                self._team[index] = ready[0], count
                self._spares.remove(ready.pop(0))
        self._tell("answers", team=self._team, spares=[], left_out={})

    def _answer(self, fit: Sequence[str], problems: Mapping[str, Sequence[Problem]]) -> None:
        """Answer those who wait: the team takes part, the others that could are spares, the rest is left out."""
        group, team = self._group, {host for host, _ in self._team}
        spares, left_out = list[str](), dict[str, str]()
        for host in self._waiting:
            words = "; ".join(problem.words for problem in problems[host])
            if host in fit and host not in team:
                logger.info(f"machine {host} {'is a spare' if group.num_spares else 'joins'}")
                spares.append(host)
                continue
            if host not in team:
                logger.warning(f"machine {host} is left out: {words}")
                left_out[host] = words
            elif words:
                logger.warning(f"machine {host}: {words}")
            if host in team and group.num_spares and host in self._last_spares:
                logger.info(f"machine {host}, a spare, takes the place of another one")
        self._spares += spares
        self._left_out |= set(left_out)
        self._tell("answers", team=self._team, spares=spares, left_out=left_out)
        self._waiting.clear()

    def _describe_ending(self, problems: Mapping[str, Sequence[Problem]]) -> Decision:
        """That the job ends on all machines, and why: too few are left without the bad ones."""
        hosts = tuple(host for host in problems if any(p.severity >= Severity.ENDS for p in problems[host]))
        refused = [p.words for of_host in problems.values() for p in of_host if p.severity == Severity.REFUSES]
        if refused:
            return Decision(False, REFUSED, f"{refused[0]}.", self._restarts.done, bad=hosts)
        bad = [
            f"machine {host}: {problem.words}"
            for host, of_host in problems.items()
            for problem in of_host
            if problem.severity == Severity.ENDS
        ]
        least = self._group.min_nodes
        remedy = f"start again with {least} others, or set fault.on_bad_machine=warn to train all the same"
        return Decision(False, FAILED, f"{'; '.join(bad)}; {remedy}", self._restarts.done, bad=hosts)

    def _has_ended(self) -> bool:
        """Whether the attempt has ended on all machines of the team that are not lost."""
        if any(host not in self._ended and host not in self._silent for host, _ in self._team):
            return False
        now = time.monotonic()
        self._complete_at = now if self._complete_at is None else self._complete_at
        num_asked = len(self._find_asked())
        return not 0 < num_asked < len(self._team) or now - self._complete_at > _ASKING_SECONDS

    def _find_asked(self) -> list[str]:
        return [host for host, _ in self._team if host in self._asked]

    def _decide(self) -> None:
        """Decide for all machines, now that the attempt has ended."""
        reports = {host: self._ended.get(host) for host, _ in self._team}
        asked, num_spares = self._find_asked(), len(set(self._spares) - self._silent)
        if self._host in asked and self._group.store_name is None:  # the store is lost with the coordinator
            asked, num_spares = list(reports), 0
        meets_again = "meets_again" in self._told
        self._end(decide(reports, frozenset(asked), self._group, self._restarts, num_spares, meets_again))

    def _end_short(self) -> None:
        """End the job if so many machines were lost after the last attempt that too few are left for the next one."""
        lost = self._last_team & self._silent
        left = {*self._last_team, *self._last_spares, *self._reports} - self._silent
        if lost and len(left) < self._group.min_nodes:
            reports = {
                host: HostReport(host, FAILED, "", False, Likelihood.ECHO, 0.0, self._last_step) for host in left
            }
            self._end(decide({**reports, **dict.fromkeys(lost)}, frozenset(), self._group, self._restarts))

    def _end(self, decision: Decision) -> None:
        self._tell("decision", decision=asdict(decision))
        if decision.goes_on:
            self._begin(self._attempt + 1, AttemptNews(self._team, self._spares, decision=decision))
        else:
            self._readers = self.hosts() - {self._host}
