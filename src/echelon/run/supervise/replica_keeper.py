"""Keeps replicas running, those of a quorum or the workers of parameter servers: starts a lost one again while the
others train on."""

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from echelon.ground.errors import LaunchError
from echelon.ground.launch_environment import replica_environment
from echelon.ground.sockets import host_store, listen_at
from echelon.ground.stored import write_text
from echelon.ground.variables import read_environment
from echelon.run.supervise.board import Change, MembershipStore, View, name_member
from echelon.run.supervise.hands import Machines, RemoteWorker
from echelon.run.supervise.outcome import FAILED, ProcessDeath, describe_ending, find_silent, read_outcomes
from echelon.run.supervise.warm_start import StartedWorker, WarmStart, end_workers, start_worker
from echelon.run.supervise.workers import Workers

logger = logging.getLogger(__name__)

_HERE = "127.0.0.1"
_LOOK_SECONDS = 0.05
_STORE_SECONDS = 60.0
# How long a missing replica may take to return while the others rest, and so are not watched for hangs.
_RETURN_SECONDS = 900.0
# A replica that dies this many times in a row before it trains is not started again.
_MAX_FAILED_STARTS = 3


@dataclass
class _Replica:
    """A running replica.

    Attributes:
        number: from 0; a replica that is started again keeps it.
        members: the names of its processes in this start.
        processes: them, in the same order, also on other machines.
        started: when, in UTC seconds.
        is_ready: whether it can train.
        has_state: whether it has the weights of the run: it has begun to train in a view.
    """

    number: int
    members: tuple[str, ...]
    processes: tuple[StartedWorker | RemoteWorker, ...]
    started: float
    is_ready: bool = False
    has_state: bool = False

    @property
    def pid(self) -> int:
        """Its first process."""
        return self.processes[0].pid

    @property
    def first_rank(self) -> int:
        """The rank of its first process in the job."""
        return self.number * len(self.processes)

    def find_ended(self) -> list[ProcessDeath]:
        """Its processes that have ended, with any code."""
        codes = [process.poll() for process in self.processes]
        return [
            ProcessDeath(self.first_rank + index, process.pid, code, time.time())
            for index, (process, code) in enumerate(zip(self.processes, codes, strict=True))
            if code is not None
        ]

    def describe_ending(self, death: ProcessDeath) -> str:
        """How one of its processes has ended, and on which machine if that is another one."""
        process = self.processes[death.rank - self.first_rank]
        return process.describe_ending(death) if isinstance(process, RemoteWorker) else describe_ending(death)

    def kill(self) -> None:
        """End the processes that still run, and wait until they have ended."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.kill()
        for process in running:
            process.wait()


class ReplicaSupervisor:
    """Runs one attempt of a job whose replicas may be lost one by one."""

    def __init__(
        self, job: Workers, warm: WarmStart | None, machines: Machines | None = None, least_machines: int = 1
    ) -> None:
        """`warm`: the process that forks the workers; without one each starts an interpreter.

        `machines`: the other machines of the job; None if all replicas are processes of this one. `least_machines`: it
        starts once so many are there, with this one.
        """
        self._job = job
        self._warm = warm
        self._machines = machines
        self._least_machines = least_machines
        self._address = _HERE if machines is None else machines.address
        listener = listen_at(self._address, 0)
        assert listener is not None, "this machine has this address"
        self._store = host_store(listener, _STORE_SECONDS)
        self._board = MembershipStore(self._store)
        self._running: dict[int, _Replica] = {}
        self._view: View | None = None
        self._changes: list[Change] = []
        self._num_replicas = job.world_size // job.replica_size
        self._num_starts = dict.fromkeys(range(self._num_replicas), 0)
        self._failed_starts = dict.fromkeys(range(self._num_replicas), 0)
        self._due = set(self._num_starts)
        self._is_ending = False
        self._short_since: float | None = None

    def run(self) -> list[ProcessDeath]:
        """Start the replicas, and return when the job has ended; no worker outlives the call.

        Returns the processes whose death ended the job: one that reported an error, which the others would meet too,
        one that the others need, or the last ones, if no replica is left that trains.
        """
        try:
            self._await_machines()
            self._start_due()
            while self._running:
                deaths = list(self._reap())
                if deaths:
                    return deaths
                if not self._is_ending:
                    self._start_due()
                self._publish()
                time.sleep(_LOOK_SECONDS)
            return []
        finally:
            self._end_all()

    def _await_machines(self) -> None:
        """Wait until enough machines are there. Raises LaunchError if they do not come."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while self._machines is not None and self._machines.num_there < self._least_machines:
            self._machines.admit()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self._machines.num_there} of {self._least_machines} machines have come to the keeper of the "
                    f"processes in {_RETURN_SECONDS:g} s."
                )
            time.sleep(_LOOK_SECONDS)

    def _has_place(self, number: int) -> bool:
        """Whether the machines of a replica's processes are there."""
        if self._machines is None:
            return True
        self._machines.admit()
        size = self._job.replica_size
        places = {rank // self._job.num_processes for rank in range(number * size, (number + 1) * size)}
        return all(map(self._machines.is_there, places))

    def _start_due(self) -> None:
        """Start the replicas that do not run, and whose machines are there."""
        for number in sorted(self._due):
            if self._has_place(number):
                self._due.remove(number)
                self._start(number)

    def _start(self, number: int) -> None:
        """Start a replica, by this number, in new processes."""
        size, start = self._job.replica_size, self._num_starts[number]
        self._num_starts[number] += 1
        members, processes, now = tuple(name_member(number, start, index) for index in range(size)), [], time.time()
        for index, member in enumerate(members):
            processes.append(self._start_process(number * size + index, member))
        self._running[number] = _Replica(number, members, tuple(processes), now)

    def _start_process(self, rank: int, member: str) -> StartedWorker | RemoteWorker:
        job, machine, port = self._job, rank // self._job.num_processes, self._store.port
        if machine and self._machines is not None:
            return self._machines.at(machine).start(member, rank, port)
        env = replica_environment(rank, job.world_size, job.num_processes, self._address, port, member)
        return start_worker(job.argv, {**read_environment(), **env}, self._warm)

    def _listen(self) -> None:
        """Remember what the replicas say of themselves: the board may forget it."""
        for replica in self._running.values():
            replica.is_ready = replica.is_ready or self._is_marked("ready", replica)
            replica.has_state = replica.has_state or self._is_marked("trains", replica)

    def _is_marked(self, word: str, replica: _Replica) -> bool:
        return all(self._board.is_marked(word, member) for member in replica.members)

    def _reap(self) -> Iterable[ProcessDeath]:
        """Handle the processes that have ended; yields those whose death ends the job."""
        ended = [replica for replica in self._running.values() if replica.find_ended()]
        self._listen()
        for replica in ended:
            deaths = replica.find_ended()  # once more: a process that saw another one's death may have been found first
            silent = find_silent(self._job.folder.outcomes_dir)
            failed = [death for death in deaths if death.exit_code != 0 or death.rank in silent]
            if failed:
                yield from self._handle(replica, failed)
            else:  # done, stopped or refused: the others are about to end in the same way
                self._is_ending = True
                if len(deaths) == len(replica.processes):
                    del self._running[replica.number]
        if self._is_ending and not any(replica.has_state for replica in self._running.values()):
            for replica in self._running.values():  # started again, and too late to take part
                replica.kill()
            self._running.clear()

    def _handle(self, replica: _Replica, failed: list[ProcessDeath]) -> Iterable[ProcessDeath]:
        """Take out a replica some of whose processes have failed; yields a death that ends the job.

        A process that only reports the loss of another one of its replica is not the reason.
        """
        replica.kill()
        del self._running[replica.number]
        outcomes = read_outcomes(self._job.folder.outcomes_dir)
        told = {o.rank: o for o in outcomes if o.code == FAILED and o.time >= replica.started}
        causes = [death for death in failed if death.rank not in told] or failed
        reporting = [death for death in causes if death.rank in told and not told[death.rank].secondary]
        if reporting:
            yield reporting[0]
        elif not (self._is_ending or self._can_spare(replica)) or not self._lose(replica, causes[0]):
            yield causes[0]

    def _can_spare(self, replica: _Replica) -> bool:
        """Whether another replica trains, and needs nothing that only this one has."""
        is_essential = replica.number < self._job.num_essential
        return not is_essential and any(other.has_state for other in self._running.values() if other is not replica)

    def _lose(self, replica: _Replica, death: ProcessDeath) -> bool:
        """Go on without a replica, and start it again; return False if too few are left, and none returns."""
        number = replica.number
        self._failed_starts[number] = 0 if replica.has_state else self._failed_starts[number] + 1
        if self._view is not None and replica.members[0] in self._view.members:
            self._board.end(self._view.number)
            self._changes.append(Change(number, death.pid, death.time, replica.describe_ending(death)))
        if self._is_ending or (self._job.folder.stop_path.exists() and not self._job.needs_all):
            return True
        if self._failed_starts[number] == _MAX_FAILED_STARTS:
            line = (
                f"process {death.rank} {replica.describe_ending(death)}, and ended {_MAX_FAILED_STARTS} times in a row "
                f"before it trained: it is not started again; see {self._job.folder.log_path(death.rank)}"
            )
            logger.warning(line)
            return len(self._running) >= (self._job.min_replicas or 1)
        self._due.add(number)
        return True

    def _publish(self) -> None:
        """Publish a view if one is due: the first one, one without a lost replica, or one with a returned replica.

        A view that is over although all of its replicas run is published again: somebody else has ended it.
        """
        ready = [replica for replica in self._running.values() if replica.is_ready]
        if self._view is None:
            if len(ready) == len(self._running) >= self._least:  # those of machines that are not there come later
                self._show(View(0, _list_members(ready)))
            return
        members = self._view.members
        staying = sorted((r for r in ready if r.members[0] in members), key=lambda r: members.index(r.members[0]))
        joining = [] if self._is_ending else [replica for replica in ready if replica not in staying]
        is_due = joining or _list_members(staying) != members or self._board.is_over(self._view.number)
        is_short = len(staying) + len(joining) < self._least
        self._tell_short(is_short)
        if is_due and not is_short:
            joined = [Change(replica.number, replica.pid, time.time()) for replica in joining]
            changes = (*self._changes, *joined)
            self._show(View(self._view.number + 1, _list_members([*staying, *joining]), changes))

    def _tell_short(self, is_short: bool) -> None:
        """Tell the others whether they wait for a replica that starts again, which may take some time."""
        if not is_short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = time.monotonic()
        is_awaited = self._short_since is not None and time.monotonic() - self._short_since < _RETURN_SECONDS
        path = self._job.folder.awaited_path
        if is_awaited != path.exists():
            if self._machines is not None:
                self._machines.tell(do="await", is_awaited=is_awaited)
            with suppress(OSError):  # the disk may be full: the others then count their wait
                write_text(path, "a lost replica starts again\n") if is_awaited else path.unlink(missing_ok=True)

    def _show(self, view: View) -> None:
        self._view = view
        self._changes.clear()
        self._board.publish(view)

    @property
    def _least(self) -> int:
        """With fewer replicas the others wait for a lost one to return; not if they are to stop, and must save."""
        waits = self._job.needs_all or (not self._is_ending and not self._job.folder.stop_path.exists())
        return self._job.min_replicas or 1 if waits else 1

    def _end_all(self) -> None:
        if self._machines is not None:
            self._machines.tell(do="end")
        processes = [process for replica in self._running.values() for process in replica.processes]
        end_workers(processes, self._job.folder)
        self._running.clear()
        if self._machines is not None:
            self._machines.close()


def _list_members(replicas: Iterable[_Replica]) -> tuple[str, ...]:
    return tuple(member for replica in replicas for member in replica.members)
