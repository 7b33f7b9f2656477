"""The worker processes that an agent starts on its machine."""

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from echelon.ground.stored import write_text
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import Outcome, ProcessDeath
from echelon.run.supervise.warm_start import PATIENCE_SECONDS, StartedWorker, WarmStart, end_workers, start_worker

_LOOK_SECONDS = 0.1


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
