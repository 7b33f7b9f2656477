"""Keeps replicas running, those of a quorum or the workers of parameter servers: starts a lost one again while the
others train on."""

import logging
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from echelon.ground.launch_environment import replica_environment
from echelon.ground.sockets import host_store, listen_at
from echelon.ground.stored import write_text
from echelon.ground.variables import read_environment
from echelon.run.supervise.board import Board, Change, View
from echelon.run.supervise.outcome import FAILED, ProcessDeath, describe_ending, read_outcomes
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
    """A running replica: its number, the name of this start, and its process.

    Attributes:
        is_ready: whether it can train.
        has_state: whether it has the weights of the run: it has begun to train in a view.
    """

    number: int
    member: str
    process: StartedWorker
    is_ready: bool = False
    has_state: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid


class ReplicaKeeper:
    """Runs one attempt of a job whose replicas may be lost one by one. All replicas are processes of this machine."""

    def __init__(self, job: Workers, warm: WarmStart | None) -> None:
        """`warm`: the process that forks the workers; without one each starts an interpreter."""
        self._job = job
        self._warm = warm
        listener = listen_at(_HERE, 0)
        assert listener is not None, "this machine has this address"
        self._store = host_store(listener, _STORE_SECONDS)
        self._board = Board(self._store)
        self._running: dict[int, _Replica] = {}
        self._view: View | None = None
        self._changes: list[Change] = []
        self._num_starts = dict.fromkeys(range(job.num_processes), 0)
        self._failed_starts = dict.fromkeys(range(job.num_processes), 0)
        self._is_ending = False
        self._short_since: float | None = None

    def run(self) -> list[ProcessDeath]:
        """Start the replicas, and return when the job has ended; no worker outlives the call.

        Returns the processes whose death ended the job: one that reported an error, which the others would meet too,
        one that the others need, or the last ones, if no replica is left that trains.
        """
        try:
            for number in self._num_starts:
                self._start(number)
            while self._running:
                deaths = list(self._reap())
                if deaths:
                    return deaths
                self._publish()
                time.sleep(_LOOK_SECONDS)
            return []
        finally:
            self._end_all()

    def _start(self, number: int) -> None:
        """Start a replica, by this number, in a new process."""
        member = f"{number}.{self._num_starts[number]}"
        self._num_starts[number] += 1
        place = replica_environment(number, self._job.num_processes, _HERE, self._store.port, member)
        environment = {**read_environment(), **place}
        self._running[number] = _Replica(number, member, start_worker(self._job.argv, environment, self._warm))

    def _listen(self) -> None:
        """Remember what the replicas say of themselves: the board may forget it."""
        for replica in self._running.values():
            replica.is_ready = replica.is_ready or self._board.is_marked("ready", replica.member)
            replica.has_state = replica.has_state or self._board.is_marked("trains", replica.member)

    def _reap(self) -> Iterable[ProcessDeath]:
        """Handle the processes that have ended; yields those whose death ends the job."""
        ended = [(replica, code) for replica in self._running.values() if (code := replica.process.poll()) is not None]
        self._listen()
        reported = {outcome.rank for outcome in read_outcomes(self._job.folder.outcomes_dir) if outcome.code == FAILED}
        for replica, code in ended:
            del self._running[replica.number]
            death = ProcessDeath(replica.number, replica.pid, code, time.time())
            if code == 0:  # done, stopped or refused: the others are about to end in the same way
                self._is_ending = True
            elif (
                replica.number in reported
                or not (self._is_ending or self._can_spare(replica))
                or not self._lose(replica, death)
            ):
                yield death
        if self._is_ending and not any(replica.has_state for replica in self._running.values()):
            for replica in self._running.values():  # started again, and too late to take part
                os.kill(replica.pid, signal.SIGKILL)
                replica.process.wait()
            self._running.clear()

    def _can_spare(self, replica: _Replica) -> bool:
        """Whether another replica trains, and needs nothing that only this one has."""
        is_essential = replica.number < self._job.num_essential
        return not is_essential and any(other.has_state for other in self._running.values() if other is not replica)

    def _lose(self, replica: _Replica, death: ProcessDeath) -> bool:
        """Go on without a replica, and start it again; return False if too few are left, and none returns."""
        number = replica.number
        self._failed_starts[number] = 0 if replica.has_state else self._failed_starts[number] + 1
        if self._view is not None and replica.member in self._view.members:
            self._board.end(self._view.number)
            self._changes.append(Change(number, replica.pid, death.time, describe_ending(death)))
        if self._is_ending or self._job.folder.stop_path.exists():
            return True
        if self._failed_starts[number] == _MAX_FAILED_STARTS:
            line = (
                f"process {number} {describe_ending(death)}, and ended {_MAX_FAILED_STARTS} times in a row before it "
                f"trained: it is not started again; see {self._job.folder.log_path(number)}"
            )
            logger.warning(line)
            return len(self._running) >= (self._job.min_replicas or 1)
        self._start(number)
        return True

    def _publish(self) -> None:
        """Publish a view if one is due: the first one, one without a lost replica, or one with a returned replica.

        A view that is over although all of its replicas run is published again: somebody else has ended it.
        """
        ready = {replica.member: replica for replica in self._running.values() if replica.is_ready}
        if self._view is None:
            if len(ready) == self._job.num_processes:
                self._show(View(0, tuple(ready)))
            return
        staying = [name for name in self._view.members if name in ready]
        joining = [] if self._is_ending else [name for name in ready if name not in self._view.members]
        is_due = len(staying) < len(self._view.members) or joining or self._board.is_over(self._view.number)
        is_short = len(staying) + len(joining) < self._least
        self._tell_short(is_short)
        if is_due and not is_short:
            joined = [Change(ready[name].number, ready[name].pid, time.time()) for name in joining]
            self._show(View(self._view.number + 1, (*staying, *joining), (*self._changes, *joined)))

    def _tell_short(self, is_short: bool) -> None:
        """Tell the others whether they wait for a replica that starts again, which may take some time."""
        if not is_short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = time.monotonic()
        is_awaited = self._short_since is not None and time.monotonic() - self._short_since < _RETURN_SECONDS
        path = self._job.folder.awaited_path
        if is_awaited != path.exists():
            with suppress(OSError):  # the disk may be full: the others then count their wait
                write_text(path, "a lost replica starts again\n") if is_awaited else path.unlink(missing_ok=True)

    def _show(self, view: View) -> None:
        self._view = view
        self._changes.clear()
        self._board.publish(view)

    @property
    def _least(self) -> int:
        """With fewer replicas the others wait for a lost one to return; not if they are to stop, and must save."""
        waits = not self._is_ending and not self._job.folder.stop_path.exists()
        return self._job.min_replicas or 1 if waits else 1

    def _end_all(self) -> None:
        end_workers([replica.process for replica in self._running.values()], self._job.folder)
        self._running.clear()
