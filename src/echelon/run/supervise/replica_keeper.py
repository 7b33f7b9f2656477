"""Keeps replicas running, those of a quorum or the workers of parameter servers: starts a lost one again while the
others train on.

The coordinator's machine has the keeper. It names the process that each rank is to be; the agents of all machines start
and end their processes accordingly, and tell how each has ended (`workers.py`).
"""

import json
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from echelon.ground.launch_environment import replica_environment
from echelon.ground.sockets import host_store_at
from echelon.ground.stored import write_text
from echelon.ground.variables import read_environment
from echelon.run.supervise.board import Change, MembershipStore, View, await_true, name_member
from echelon.run.supervise.coordinator import AttemptNews
from echelon.run.supervise.meeting import Meeting
from echelon.run.supervise.outcome import (
    MACHINE_LOST,
    ProcessDeath,
    RankExit,
    describe_ending,
    name_machine,
    read_outcomes,
    write_outcome,
)
from echelon.run.supervise.workers import StartedWorker, WarmStart, Workers, end_workers, start_worker

logger = logging.getLogger(__name__)

# How long a missing replica may take to return while the others rest, and so are not watched for hangs.
_RETURN_SECONDS = 900.0
# How long the processes of all machines may take to end: longer than PATIENCE_SECONDS in workers.py.
_ENDING_SECONDS = 20.0
# A replica that dies this many times in a row before it trains is not started again.
_MAX_FAILED_STARTS = 3


@dataclass
class _Replica:
    """A running replica.

    Attributes:
        number: from 0; a replica that is started again keeps it.
        members: the names of its processes in this start.
        hosts: their machines, in the same order.
        exits: how those of its processes have ended that have, by name.
        is_ready: whether it can train.
        has_state: whether it has the weights of the run: it has begun to train in a view.
    """

    number: int
    members: tuple[str, ...]
    hosts: tuple[str, ...]
    exits: dict[str, RankExit] = field(default_factory=dict)
    is_ready: bool = False
    has_state: bool = False

    @property
    def ranks(self) -> range:
        """The ranks of its processes in the job."""
        return range(self.number * len(self.members), (self.number + 1) * len(self.members))


class KeptRanks:
    """The processes of this machine where others live on: each rank is the one that the keeper has named last."""

    def __init__(self, job: Workers, warm: WarmStart | None, meeting: Meeting) -> None:
        """`warm`: the process that forks them; without one each starts an interpreter."""
        self._job = job
        self._warm = warm
        self._meeting = meeting
        self._running: dict[int, tuple[str, float, StartedWorker]] = {}
        self._begun = set[str]()

    def follow(self, news: AttemptNews) -> None:
        """Start and end processes until each rank is the one that is named, and tell how others have ended."""
        self._report()
        self._kill_replaced(news)
        for rank, named in news.members.items():
            is_new = named is not None and named[1] == self._meeting.host and named[0] not in self._begun
            if named is not None and is_new and rank not in self._running:
                self._begun.add(named[0])
                self._running[rank] = named[0], time.time(), self._start(rank, named[0], news)
        path = self._job.folder.awaited_path
        if news.awaits != path.exists():
            with suppress(OSError):  # the disk may be full: the others then count their wait
                write_text(path, "a lost replica starts again\n") if news.awaits else path.unlink(missing_ok=True)

    def _kill_replaced(self, news: AttemptNews) -> None:
        for rank, (member, _, worker) in self._running.items():
            if news.members.get(rank) != (member, self._meeting.host):
                worker.kill()

    def _start(self, rank: int, member: str, news: AttemptNews) -> StartedWorker:
        address, port = json.loads(news.call or "")
        env = replica_environment(rank, self._job.world_size, self._job.num_processes, address, port, member)
        return start_worker(self._job.argv, {**read_environment(), **env}, self._warm)

    def _report(self) -> None:
        """Tell how processes have ended."""
        for rank, (member, started, worker) in list(self._running.items()):
            if (code := worker.poll()) is not None:
                del self._running[rank]
                outcomes = read_outcomes(self._job.folder.outcomes_dir)
                outcome = next((o for o in outcomes if o.rank == rank and o.time >= started), None)
                ending = RankExit(member, rank, worker.pid, code, time.time(), self._meeting.host, outcome)
                self._meeting.post("exit", exit=asdict(ending))

    def kill(self) -> None:
        """End them with SIGKILL, and tell nobody."""
        for _, _, worker in self._running.values():
            worker.kill()
        for _, _, worker in self._running.values():
            worker.wait()
        self._running.clear()

    def end(self) -> None:
        """End those that still run, as `end_workers` does, and tell how they have ended; others are killed."""
        self._kill_replaced(self._meeting.now())
        end_workers([worker for _, _, worker in self._running.values()], self._job.folder)
        self._report()


class ReplicaKeeper:
    """Keeps the replicas of one attempt of a job, which may be lost one by one."""

    def __init__(self, job: Workers, meeting: Meeting, address: str) -> None:
        """`address`: of this machine, where the replicas find the keeper's store."""
        self.deaths: list[ProcessDeath] = []
        """Those that end the job: of a process that reported an error, which the others would meet too, of one that the
        others need, or of the last one, if no replica is left that trains."""
        self._job = job
        self._meeting = meeting
        self._store = host_store_at(address)
        self._board = MembershipStore(self._store)
        self._running: dict[int, _Replica] = {}
        self._leaving = dict[str, str]()
        """The processes that are to end, and have not yet, with their machines."""
        self._num_exits = 0
        self._view: View | None = None
        self._living_views: list[View] = []
        self._changes: list[Change] = []
        self._num_replicas = job.world_size // job.replica_size
        self._num_starts = dict.fromkeys(range(self._num_replicas), 0)
        self._failed_starts = dict.fromkeys(range(self._num_replicas), 0)
        self._due = set(self._num_starts)
        self._is_ending = self._awaits = False
        self._short_since: float | None = None
        meeting.post("call", words=json.dumps([address, self._store.port]))

    def look(self) -> bool:
        """Do what is due; call it many times a second. Returns whether the attempt is over."""
        self._start_due()
        self._take_exits()
        self._reap()
        if not self.deaths:
            self._publish()
        return bool(self.deaths) or not (self._running or self._due)

    def close(self) -> None:
        """Say that all processes are to end."""
        self._meeting.post("closing")

    def await_exits(self) -> None:
        """Wait until the processes of all machines have ended, and have reported how."""

        def have_ended() -> bool:
            self._take_exits()
            return all(len(replica.exits) == len(replica.members) for replica in self._running.values())

        await_true(have_ended, _ENDING_SECONDS)

    def _start_due(self) -> None:
        """Start the replicas that do not run, and whose machines are there."""
        if self._is_ending:
            self._due.clear()
        for number in sorted(self._due):
            ranks = range(number * self._job.replica_size, (number + 1) * self._job.replica_size)
            hosts = tuple(self._find_host(rank) for rank in ranks)
            if not self._meeting.now().lost.intersection(hosts):
                self._due.remove(number)
                members = tuple(name_member(number, self._num_starts[number], index) for index in range(len(ranks)))
                self._num_starts[number] += 1
                self._running[number] = replica = _Replica(number, members, hosts)
                self._name(replica, zip(members, hosts, strict=True))

    def _find_host(self, rank: int) -> str:
        team = self._meeting.now().team
        return self._meeting.host if team is None else team[rank // self._job.num_processes][0]

    def _name(self, replica: _Replica, members: Iterable[tuple[str, str] | None]) -> None:
        """Say which processes the ranks of a replica are to be, and on which machines; None: no process."""
        self._meeting.post("members", members=list(zip(replica.ranks, members, strict=False)))

    def _take_exits(self) -> None:
        """Take in how processes have ended, also those whose machines are lost."""
        news = self._meeting.now()
        exits, self._num_exits = news.exits[self._num_exits :], len(news.exits)
        running = {member: replica for replica in self._running.values() for member in replica.members}
        for exit_ in exits:
            self._leaving.pop(exit_.member, None)
            if (replica := running.get(exit_.member)) is not None:
                replica.exits[exit_.member] = exit_
                if exit_.outcome is not None and exit_.host != self._meeting.host:
                    # By the clock of this machine.
                    write_outcome(self._job.folder.outcomes_dir, replace(exit_.outcome, time=time.time()))
        self._leaving = {member: host for member, host in self._leaving.items() if host not in news.lost}
        for replica in self._running.values() if news.lost else ():
            for rank, member, host in zip(replica.ranks, replica.members, replica.hosts, strict=True):
                if host in news.lost and member not in replica.exits:
                    pid = self._board.find_pid(member) or 0
                    replica.exits[member] = RankExit(member, rank, pid, MACHINE_LOST, time.time(), host)

    def _listen(self) -> None:
        """Remember what the replicas say of themselves: the board may forget it."""
        for replica in self._running.values():
            replica.is_ready = replica.is_ready or all(map(self._board.find_pid, replica.members))
            replica.has_state = replica.has_state or all(
                self._board.is_marked("trains", member) for member in replica.members
            )

    def _reap(self) -> None:
        """Handle the replicas some of whose processes have ended."""
        self._listen()
        for replica in [replica for replica in self._running.values() if replica.exits]:
            if failed := [exit_ for exit_ in replica.exits.values() if exit_.has_failed]:
                self._handle(replica, failed)
            else:  # done, stopped or refused: the others are about to end in the same way
                self._is_ending = True
                if len(replica.exits) == len(replica.members):
                    del self._running[replica.number]
        if self._is_ending and not any(replica.has_state for replica in self._running.values()):
            for replica in self._running.values():  # started again, and too late to take part
                self._end(replica)
            self._running.clear()

    def _end(self, replica: _Replica) -> None:
        """End the processes of a replica."""
        left = {m: host for m, host in zip(replica.members, replica.hosts, strict=True) if m not in replica.exits}
        self._leaving |= left
        self._name(replica, [None] * len(replica.members))

    def _handle(self, replica: _Replica, failed: list[RankExit]) -> None:
        """Take out a replica some of whose processes have failed; if the job ends with it, remember the death.

        A process that only reports the loss of another one of its replica is not the reason.
        """
        self._end(replica)
        del self._running[replica.number]
        causes = [exit_ for exit_ in failed if exit_.error is None] or failed
        reporting = [exit_ for exit_ in causes if exit_.error is not None and not exit_.error.secondary]
        ends_all = bool(reporting) or not (self._is_ending or self._can_spare(replica))
        if ends_all or not self._lose(replica, causes[0]):
            self.deaths.append((reporting or causes)[0].death)

    def _can_spare(self, replica: _Replica) -> bool:
        """Whether another replica trains, and needs nothing that only this one has."""
        is_essential = replica.number < self._job.num_essential
        return not is_essential and any(other.has_state for other in self._running.values() if other is not replica)

    def _lose(self, replica: _Replica, cause: RankExit) -> bool:
        """Go on without a replica, and start it again; return False if too few are left, and none returns."""
        number, death = replica.number, cause.death
        ending = describe_ending(death)
        if cause.host != self._meeting.host:
            ending = f"{ending}{'' if cause.code == MACHINE_LOST else ' on'} {name_machine(cause.host)}"
        self._failed_starts[number] = 0 if replica.has_state else self._failed_starts[number] + 1
        for view in [view for view in self._living_views if replica.members[0] in view.members]:
            self._board.end(view.number)  # also one that the others have not left yet, in which they wait for it
            self._living_views.remove(view)
        if self._view is not None and replica.members[0] in self._view.members:
            self._changes.append(Change(number, death.pid, death.time, ending))
        if self._is_ending or (self._job.folder.stop_path.exists() and not self._job.needs_all):
            return True
        if self._failed_starts[number] == _MAX_FAILED_STARTS:
            line = (
                f"process {death.rank} {ending}, and ended {_MAX_FAILED_STARTS} times in a row "
                f"before it trained: it is not started again; see {self._job.folder.log_path(death.rank)}"
            )
            logger.warning(line)
            return len(self._running) >= (self._job.min_replicas or 1)
        self._due.add(number)
        return True

    def _publish(self) -> None:
        """Publish a view if one is due: the first one, one without a lost replica, or one with a returned replica.

        A view that is over although all of its replicas run is published again: somebody else has ended it. None is
        published before the processes of a lost replica have ended: they may still write.
        """
        ready = [replica for replica in self._running.values() if replica.is_ready]
        if self._view is not None and not self._leaving:
            self._publish_next(self._view, ready)
        elif self._view is None and len(ready) == len(self._running) >= self._least:
            self._show(View(0, _list_members(ready)))

    def _publish_next(self, view: View, ready: list[_Replica]) -> None:
        members = view.members
        staying = sorted((r for r in ready if r.members[0] in members), key=lambda r: members.index(r.members[0]))
        joining = [] if self._is_ending else [replica for replica in ready if replica not in staying]
        is_due = joining or _list_members(staying) != members or self._board.is_over(view.number)
        is_short = len(staying) + len(joining) < self._least
        self._tell_short(is_short)
        if is_due and not is_short:
            joined = [Change(r.number, self._board.find_pid(r.members[0]) or 0, time.time()) for r in joining]
            changes = (*self._changes, *joined)
            self._show(View(view.number + 1, _list_members([*staying, *joining]), changes))

    def _tell_short(self, is_short: bool) -> None:
        """Tell the others whether they wait for a replica that starts again, which may take some time."""
        self._short_since = self._short_since or time.monotonic() if is_short else None
        awaits = self._short_since is not None and time.monotonic() - self._short_since < _RETURN_SECONDS
        if awaits != self._awaits:
            self._awaits = awaits
            self._meeting.post("awaits", is_so=awaits)

    def _show(self, view: View) -> None:
        self._view = view
        self._living_views.append(view)
        self._changes.clear()
        self._board.publish(view)

    @property
    def _least(self) -> int:
        """With fewer replicas the others wait for a lost one to return; not if they are to stop, and must save."""
        waits = self._job.needs_all or (not self._is_ending and not self._job.folder.stop_path.exists())
        return self._job.min_replicas or 1 if waits else 1


def _list_members(replicas: Iterable[_Replica]) -> tuple[str, ...]:
    return tuple(member for replica in replicas for member in replica.members)
