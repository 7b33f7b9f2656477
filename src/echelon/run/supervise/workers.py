"""The worker processes that an agent starts on its machine, forked from a warm process instead of an interpreter each.

Importing torch and transformers takes seconds of processor time. A warm process imports them once, while the run is
prepared, and forks every worker of the run from then on, also after a failure. It has no threads, no process group and
no GPU context. A forked worker is a child of the agent, with its own session and exactly the environment of a started
one, but without the seconds of imports. Where this is not possible, the agent starts the workers as usual.
"""

import ctypes
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from echelon.ground.cores import num_cores
from echelon.ground.launch_environment import worker_environment
from echelon.ground.stored import write_text
from echelon.ground.variables import read_environment
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import Outcome, ProcessDeath

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1

PATIENCE_SECONDS = 6.0
"""How long workers may take to exit once one has failed. Longer than `_KILLED_BY_AGENT_SECONDS` in outcome.py."""

# prctl(2): descendants whose parent ends become children of this process.
_PR_SET_CHILD_SUBREAPER = 36
# Device files of NVIDIA's, AMD's and Intel's GPUs. A library that has opened one does not survive a fork.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128", "/dev/dxg")
_START_LOOK_SECONDS = 0.01
# Libraries start threads as they are imported, which do not survive a fork. A worker sets its own number of threads.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@contextmanager
def workers_warmed(num_processes: int | None) -> Iterator["WarmStart | None"]:
    """A warm process during the block, which does its imports meanwhile; None if workers cannot be forked here.

    `num_processes`: how many workers there will be; None if that is not known yet.
    """
    if sys.platform != "linux" or any(Path(path).exists() for path in _GPU_DEVICES):
        yield None
        return
    # A guess is enough: each worker gets an environment of its own.
    environment = worker_environment(num_processes or max(1, num_cores() // 2))
    with closing(WarmStart((sys.executable, "-m", "echelon.run.lifecycle.warm_worker"), environment)) as warm:
        yield warm


class WarmStart:
    """The agent's side of the warm process. Not for use by several threads."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process: `argv` followed by the number of a socket's file descriptor. Does not wait for it."""
        self._channel, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [*argv, str(its.fileno())],
                env={**read_environment(), **env, **_ONE_THREAD},
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._answers = self._channel.makefile("r", encoding="ascii")

    def fork(self, command: Sequence[str], env: Mapping[str, str]) -> "ForkedWorker | None":
        """The worker that `command`, `python -m MODULE ARGUMENTS`, would start. Waits for the imports.

        None if the process cannot fork one.
        """
        request = json.dumps({"command": list(command), "env": dict(env)})
        with suppress(OSError, ValueError), _orphans_adopted():
            self._channel.sendall(f"{request}\n".encode("ascii"))
            pid = json.loads(self._answers.readline())
            return None if pid is None else ForkedWorker(pid)
        return None

    def close(self) -> None:
        """End the process. Its workers go on."""
        self._answers.close()
        self._channel.close()
        self._process.kill()
        self._process.wait()


class ForkedWorker:
    """A forked child of this process, with the part of `subprocess.Popen` that is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(_START_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)


StartedWorker = ForkedWorker | subprocess.Popen[bytes]
"""A worker process: a child of this one, in a session of its own."""


def start_worker(argv: Sequence[str], env: Mapping[str, str], warm: WarmStart | None) -> StartedWorker:
    """Start the command with this environment, without a terminal's input; forked from `warm` if that is possible."""
    worker = None if warm is None else warm.fork(argv, env)
    return worker or subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def end_workers(workers: Sequence[StartedWorker], folder: RunFolder) -> None:
    """End the workers that still run: they notice that the job has failed; what does not exit is killed."""
    running = [worker for worker in workers if worker.poll() is None]
    if running:
        with suppress(OSError):  # the disk may be full
            write_text(folder.death_path, "a rank has died\n")
    deadline = time.monotonic() + PATIENCE_SECONDS
    for worker in running:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(max(0.0, deadline - time.monotonic()))
            continue
        worker.kill()
        worker.wait()


@contextmanager
def _orphans_adopted() -> Iterator[None]:
    """Make this process the parent of descendants that lose theirs during the block."""
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        control(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@dataclass(frozen=True)
class Workers:
    """`num_processes` copies of `argv` on this machine, which differ in RANK and the other variables of torchrun.

    `max_restarts`: how often all of them are restarted after a failure. `notice_seconds`: how long they may take to
    save when they are asked to stop; 0: they are ended immediately. `min_replicas`: the workers are replicas, of which
    at least so many train, and the others go on without a lost one; None: they are ranks that need each other.
    `replica_size`: so many workers are one replica. `num_essential`: the first so many replicas are parameter servers,
    which the others need. `needs_all`: the others go on only with a new one in the place of a lost one, also to save
    and stop. Of a quorum on several machines: `num_machines`, and `prepare`, by which the first one prepares the run;
    it returns how the job ends, or None if it can start.
    """

    argv: tuple[str, ...]
    num_processes: int
    folder: RunFolder
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    notice_seconds: float = 0.0
    min_replicas: int | None = None
    replica_size: int = 1
    num_essential: int = 0
    needs_all: bool = False
    num_machines: int = 1
    prepare: Callable[[], Outcome | None] | None = None

    @property
    def world_size(self) -> int:
        """The processes of all machines."""
        return self.num_processes * self.num_machines


class LocalRanks:
    """The ranks of this machine in one attempt: children of this process, from their start to their end."""

    def __init__(self, folder: RunFolder, warm: WarmStart | None = None) -> None:
        """`warm`: the process that forks them; without one each starts an interpreter."""
        self.deaths: list[ProcessDeath] = []
        """Those that have exited with another code than 0, or by a signal."""
        self._folder = folder
        self._warm = warm
        self._running: dict[int, StartedWorker] = {}

    def start(self, argv: tuple[str, ...], rank: int, env: Mapping[str, str]) -> None:
        """Start a rank with this environment."""
        self._running[rank] = start_worker(argv, env, self._warm)

    def wait(self, leaves: Callable[[], bool] = lambda: False) -> None:
        """Wait until all have ended.

        Once one has failed, or the folder says that a rank of another machine has, the others are told through the
        folder, since they may wait for it forever. Those that do not exit then are killed: a suspended process handles
        no signal. `leaves`: whether all are to save and stop, because the machines meet again.
        """
        death_path, ends_at, is_told = self._folder.death_path, math.inf, False
        while self._take_ended():
            if self.deaths and ends_at == math.inf:
                with suppress(OSError):  # the disk may be full
                    write_text(death_path, "a rank has died\n")
            if self.deaths or death_path.exists():
                ends_at = min(ends_at, time.monotonic() + PATIENCE_SECONDS)
            if time.monotonic() > ends_at:
                self.kill()
            elif not is_told and leaves() and set(self._running) <= set(self._folder.read_pids()):
                is_told = True
                for worker in self._running.values():
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGTERM)
            time.sleep(_LOOK_SECONDS)

    def _take_ended(self) -> bool:
        """Record the deaths; returns whether a rank still runs."""
        for rank, worker in list(self._running.items()):
            if (code := worker.poll()) is not None:
                is_known = self._running.pop(rank, None) is None  # to another thread
                if code != 0 and not is_known:
                    self.deaths.append(ProcessDeath(rank, worker.pid, code, time.time()))
        return bool(self._running)

    def kill(self) -> None:
        """End those that still run with SIGKILL."""
        for worker in list(self._running.values()):
            worker.kill()

    def end(self) -> None:
        """End those that still run, as `end_workers` does."""
        end_workers(list(self._running.values()), self._folder)
        self._take_ended()
