"""Finds a rank that is persistently slower than others, from the time that each needs for its own part of a step."""

import logging
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from typing_extensions import override

from echelon.ground.medians import find_medians_of_others
from echelon.ground.stop_request import STRAGGLER
from echelon.ground.stored import write_text
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import gather_objects
from echelon.run.training.callbacks import FinishedStep, Monitor

if TYPE_CHECKING:
    from echelon.run.journal.journal import Journal

logger = logging.getLogger(__name__)

# A rank is slow if, in so many windows in a row, the median of its own time over the steps of the window is above that
# of its peers by a share of it, and by a share of the step.
_WINDOW_STEPS = 25
_NUM_WINDOWS = 2
_SLOWER = 1.25
_SHARE_OF_STEP = 0.10
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def read_own_time() -> float:
    """Return the seconds in which the calling thread has worked or waited for a core, but not for other ranks.

    Without a GPU that is a rank's own part of a step. Linux counts it for each thread, in nanoseconds
    (Documentation/scheduler/sched-stats.rst); elsewhere only the work is known.
    """
    try:
        worked, waited, _ = _SCHEDSTAT.read_bytes().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(worked) + int(waited)) / 1e9


@dataclass(frozen=True)
class Straggler:
    """A slow rank: its own seconds per step, those of its peers, medians. `step`: the one after which it was found."""

    step: int
    rank: int
    host: str
    own_seconds: float
    peer_seconds: float
    step_seconds: float

    def describe(self) -> str:
        """Return a sentence about it."""
        factor = "" if self.peer_seconds <= 0 else f", {self.own_seconds / self.peer_seconds:.2f} times those of others"
        return (
            f"rank {self.rank} on {self.host} is slow: over the last {_NUM_WINDOWS * _WINDOW_STEPS} steps it needed "
            f"{1e3 * self.own_seconds:.1f} ms for its own part of a step{factor}; the other ranks wait for it"
        )


def median_of_peers(own: Sequence[float], stages: Sequence[int]) -> list[float]:
    """For each rank the median of the other numbers of its stage; without others its own."""
    usual = list(own)
    for stage in set(stages):
        ranks = [rank for rank in range(len(own)) if stages[rank] == stage]
        for rank, middle in zip(ranks, find_medians_of_others([own[rank] for rank in ranks]), strict=True):
            usual[rank] = middle
    return usual


class StragglerWatch(Monitor):
    """Compares the ranks' own times of each step. Every rank has the same numbers, and reaches the same result."""

    def __init__(
        self,
        hosts: Sequence[str],
        stages: Sequence[int],
        stops: bool = False,
        tell: Callable[[Straggler], None] = lambda slow: None,
    ) -> None:
        """By rank: its host, and the stage of its pipeline, which is compared only with itself.

        `stops`: whether the run ends when a rank is found. `tell`: called with each that is found.
        """
        self._hosts = hosts
        self._stages = stages
        self._stops = stops
        self._tell = tell
        self._window: deque[tuple[Sequence[float], float]] = deque(maxlen=_WINDOW_STEPS)
        self._in_a_row = [0] * len(hosts)
        self._medians: list[float] | None = None
        """Of several ranks the own seconds, medians over the window that the last step completed, if it did."""

    @override
    def on_metrics(self, step: FinishedStep) -> None:
        if self.saw_step(step.state.step, step.metrics.own_seconds, step.metrics.wall_seconds) and self._stops:
            step.stop_cause = STRAGGLER
        if self._medians is not None:
            step.measured["rank_seconds"] = [float(f"{seconds:.4g}") for seconds in self._medians]

    def saw_step(self, step: int, own_seconds: Sequence[float], step_seconds: float) -> list[Straggler]:
        """Count a step with the own times of all ranks; return those that are found slow after this one."""
        self._window.append((own_seconds, step_seconds))
        self._medians = None
        if len(self._window) < _WINDOW_STEPS:
            return []
        times_of_ranks = zip(*(times for times, _ in self._window), strict=True)
        medians = [statistics.median(times) for times in times_of_ranks]
        whole = statistics.median(seconds for _, seconds in self._window)
        self._window.clear()
        self._medians = medians if len(medians) > 1 else None
        stragglers = []
        for rank, (seconds, usual) in enumerate(zip(medians, median_of_peers(medians, self._stages), strict=True)):
            is_slow = seconds >= _SLOWER * usual and seconds - usual >= _SHARE_OF_STEP * whole
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow else 0
            if self._in_a_row[rank] == _NUM_WINDOWS:
                stragglers.append(Straggler(step, rank, self._hosts[rank], seconds, usual, whole))
        for slow in stragglers:
            self._tell(slow)
        return stragglers


def build_straggler_watch(meshes: Meshes, reaction: str, slow_path: Path, journal: "Journal | None") -> StragglerWatch:
    """Build the watch of this rank. `reaction`: `fault.on_straggler`. Collective: hosts are gathered.

    `slow_path`: the file by which a rank tells the agent of its machine that a spare may take the machine's place.
    """
    hosts = gather_objects(platform.node(), meshes.everyone)
    stages = [meshes.grid.place(rank)["pp"] for rank in range(meshes.num_devices)]

    def tell(slow: Straggler) -> None:
        if reaction == "replace" and slow.rank == dist.get_rank(meshes.everyone):
            write_text(slow_path, slow.describe())
        if journal is not None:
            logger.warning(slow.describe())
            with suppress(OSError):  # the disk may be full
                journal.event("straggler", message=slow.describe(), **asdict(slow))

    return StragglerWatch(hosts, stages, reaction == "stop", tell)
