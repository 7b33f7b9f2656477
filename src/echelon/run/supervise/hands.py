"""The processes of a quorum on several machines: the keeper's machine says what the hand of each other machine does.

A hand starts and ends processes of its machine, and says when one has ended. Both sides talk over one connection, in
lines of JSON. When it breaks, the keeper counts the machine and its processes as lost, and the hand ends its processes:
so of a network that is divided only the keeper's side goes on.
"""

import json
import logging
import platform
import select
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.ground.errors import LaunchError
from echelon.ground.hosts import join_endpoint, limit_silence
from echelon.ground.launch_environment import replica_environment
from echelon.ground.sockets import listen_at
from echelon.ground.stored import write_text
from echelon.ground.variables import read_environment
from echelon.run.supervise.outcome import (
    MACHINE_LOST,
    ProcessDeath,
    RankOutcome,
    describe_ending,
    read_outcomes,
    write_outcome,
)
from echelon.run.supervise.warm_start import StartedWorker, WarmStart, end_workers, start_worker
from echelon.run.supervise.workers import Workers

logger = logging.getLogger(__name__)

SILENT_SECONDS = 8.0
"""A connection to another machine breaks after so long without an answer of its kernel. torch's also do."""

_LOOK_SECONDS = 0.05
_SEND_SECONDS = 5.0
_HELLO_SECONDS = 5.0
_CONNECT_SECONDS = 30.0
# How long a hand may take to end a process that it was told to end.
_KILL_SECONDS = 15.0
_LONGEST = 2**20  # bytes of a message


class Line:
    """One end of the connection between the keeper and a hand."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        limit_silence(connection, SILENT_SECONDS)
        self.is_lost = False
        self._connection = connection
        self._received = b""

    def tell(self, **words: Any) -> None:
        """Send a message; nothing if the line is lost."""
        with self._losing():
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def listen(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived."""
        with self._losing():
            while not self.is_lost and select.select([self._connection], [], [], 0)[0]:
                part = self._connection.recv(2**16)
                self._received += part
                if not part or len(self._received) > _LONGEST:
                    self.close()
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            with self._losing():
                yield dict(json.loads(line))

    def close(self) -> None:
        """Give the other side up."""
        self.is_lost = True
        self._connection.close()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """A scope in which an error of the connection, or a message that is none, ends the line."""
        try:
            yield
        except (OSError, ValueError, TypeError):
            self.close()


class RemoteWorker:
    """A process on another machine, with the part of a `StartedWorker` that its keeper uses."""

    def __init__(self, machine: "Machine", member: str) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._machine = machine
        self._member = member

    def describe_ending(self, death: ProcessDeath) -> str:
        """How it has ended, with the name of its machine, as the end of a sentence about it."""
        return f"{describe_ending(death)}{'' if death.exit_code == MACHINE_LOST else ' on'} {self._machine.name}"

    def poll(self) -> int | None:
        """The exit code; None while it runs. `MACHINE_LOST` if its machine does not answer."""
        self._machine.listen()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds.

        Without a timeout it has been told to end, and a machine on which that takes too long is given up.
        """
        deadline = time.monotonic() + (_KILL_SECONDS if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                if timeout is not None:
                    raise subprocess.TimeoutExpired(f"process {self._member}", timeout)
                self._machine.line.close()
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """Have it ended with SIGKILL."""
        self._machine.line.tell(do="kill", member=self._member)


class Machine:
    """Another machine, as the keeper sees it."""

    def __init__(self, line: Line, name: str, folder: Path) -> None:
        """`folder`: where the keeper reads how ranks have ended."""
        self.line = line
        self.name = name
        self._folder = folder
        self._workers: dict[str, RemoteWorker] = {}

    def start(self, member: str, rank: int, port: int) -> RemoteWorker:
        """Have a process started, which finds the board at a port of the keeper's address."""
        self.line.tell(do="start", member=member, rank=rank, port=port)
        return self._workers.setdefault(member, RemoteWorker(self, member))

    def listen(self) -> None:
        """Take in what the machine has said."""
        for message in self.line.listen():
            if (worker := self._workers.get(message["member"])) is None:
                continue
            worker.pid = message["pid"]
            if message["outcome"] is not None:
                # By the clock of this machine, which is compared with when the rank was started.
                write_outcome(self._folder, RankOutcome(**{**message["outcome"], "time": time.time()}))
            worker.returncode = message["code"]
        if self.line.is_lost:
            for worker in self._workers.values():
                worker.returncode = MACHINE_LOST if worker.returncode is None else worker.returncode


class Machines:
    """The other machines of a quorum, by their places: the ranks of a machine are neighbours, the keeper's are first.

    A machine that comes later takes the place of one that is lost.
    """

    def __init__(self, address: str, count: int, folder: Path) -> None:
        """`count`: of the others. Listens at a free port of this machine's address."""
        listener = listen_at(address, 0)
        assert listener is not None, "this machine has this address"
        self.address = address
        self._listener = listener
        self._listener.setblocking(False)
        self._token = uuid.uuid4().hex
        self._folder = folder
        self._places: list[Machine | None] = [None] * count

    @property
    def call(self) -> str:
        """What a hand needs to know: where the keeper listens, and a word by which it is recognized."""
        return json.dumps([self.address, self._listener.getsockname()[1], self._token])

    def admit(self) -> None:
        """Take in the machines that have connected, as far as there are places; the others wait for one."""
        free = [number for number in range(1, len(self._places) + 1) if not self.is_there(number)]
        with suppress(BlockingIOError):
            if not free:
                return
            connection, _ = self._listener.accept()
            line = Line(connection)
            deadline = time.monotonic() + _HELLO_SECONDS
            while not (hello := list(line.listen())) and not line.is_lost and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if not hello or hello[0].get("token") != self._token:
                line.close()
                return
            self._places[free[0] - 1] = Machine(line, str(hello[0].get("name")), self._folder)
            logger.info(f"machine {hello[0].get('name')} is there")

    def is_there(self, place: int) -> bool:
        """Whether there is a machine at this place; this one is at place 0."""
        if place == 0:
            return True
        machine = self._places[place - 1]
        if machine is not None:
            machine.listen()
        return machine is not None and not machine.line.is_lost

    @property
    def num_there(self) -> int:
        """How many machines there are, with this one."""
        return sum(map(self.is_there, range(len(self._places) + 1)))

    def at(self, place: int) -> Machine:
        """The machine at a place above 0, where there is one."""
        machine = self._places[place - 1]
        assert machine is not None
        return machine

    def tell(self, **words: Any) -> None:
        """Send a message to all."""
        for machine in self._places:
            if machine is not None:
                machine.line.tell(**words)

    def close(self) -> None:
        """Let them go."""
        self._listener.close()
        for machine in self._places:
            if machine is not None:
                machine.line.close()


class NodeAgent:
    """Starts and ends the processes of this machine, as the keeper on another one says."""

    def __init__(self, job: Workers, warm: WarmStart | None, call: str) -> None:
        """`call`: what `Machines.call` returned. Raises LaunchError if the keeper cannot be reached."""
        self._job = job
        self._warm = warm
        self._address, port, token = json.loads(call)
        try:
            self._line = Line(socket.create_connection((self._address, port), _CONNECT_SECONDS))
        except OSError as error:
            peer = join_endpoint(self._address, port)
            raise LaunchError(f"the machine that keeps the replicas cannot be reached at {peer}: {error}") from error
        self._line.tell(token=token, name=platform.node())
        self._running: dict[str, tuple[int, float, StartedWorker]] = {}
        self._is_over = False

    def run(self) -> bool:
        """Obey until the attempt is over; False if the keeper is lost before. No process outlives the call."""
        try:
            while not self._is_over and not self._line.is_lost:
                for order in self._line.listen():
                    self._obey(order)
                self._report()
                time.sleep(_LOOK_SECONDS)
        finally:
            if self._running and not self._is_over:
                logger.warning("the machine that keeps the processes does not answer; this machine stops")
            for _, _, worker in self._running.values():
                worker.kill()
            for _, _, worker in self._running.values():
                worker.wait()
            self._line.close()
        return self._is_over

    def _obey(self, order: dict[str, Any]) -> None:
        job = self._job
        if order["do"] == "start":
            member, rank = order["member"], order["rank"]
            env = replica_environment(rank, job.world_size, job.num_processes, self._address, order["port"], member)
            worker = start_worker(job.argv, {**read_environment(), **env}, self._warm)
            self._running[member] = (rank, time.time(), worker)
            self._line.tell(member=member, pid=worker.pid, code=None, outcome=None)
        elif order["do"] == "kill" and order["member"] in self._running:
            self._running[order["member"]][2].kill()
        elif order["do"] == "await":
            with suppress(OSError):
                path = job.folder.awaited_path
                write_text(path, "a lost replica starts again\n") if order["is_awaited"] else path.unlink(True)
        elif order["do"] == "end":
            self._is_over = True
            end_workers([worker for _, _, worker in self._running.values()], job.folder)
            self._report()

    def _report(self) -> None:
        """Tell the keeper of the processes that have ended."""
        for member, (rank, started, worker) in list(self._running.items()):
            if (code := worker.poll()) is not None:
                del self._running[member]
                outcome = _find_outcome(read_outcomes(self._job.folder.outcomes_dir), rank, started)
                self._line.tell(member=member, pid=worker.pid, code=code, outcome=outcome)


def _find_outcome(outcomes: Sequence[RankOutcome], rank: int, started: float) -> dict[str, Any] | None:
    """What a rank has reported since it was started."""
    return next((asdict(o) for o in outcomes if o.rank == rank and o.time >= started), None)
