"""Finds a rank that is persistently slower than others, from the time that each needs for its own part of a step."""

import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

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
# A row of metrics.jsonl has the times of so many ranks.
_NAMED_RANKS = 32
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


def median_of_peers(own: NDArray[np.float64], stages: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each rank the median of the other numbers of its stage; without others its own. Both are [ranks]."""
    usual = own.copy()
    for stage in np.unique(stages):
        ranks = np.flatnonzero(stages == stage)
        order, index = ranks[np.argsort(own[ranks], kind="stable")], np.arange(len(ranks))
        low, high = (len(ranks) - 2) // 2, (len(ranks) - 1) // 2  # the middle of a stage without one of its ranks
        if len(ranks) > 1:
            usual[order] = (own[order][low + (low >= index)] + own[order][high + (high >= index)]) / 2
    return usual


class StragglerWatch(Monitor):
    """Compares the ranks' own times of each step. On rank 0 alone: all times are there."""

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
        self._stages = np.asarray(stages)
        self._stops = stops
        self._tell = tell
        self._window: list[tuple[NDArray[np.float64], float]] = []
        self._in_a_row = np.zeros(len(hosts), np.int64)
        self._medians: NDArray[np.float64] | None = None
        """Of several ranks the own seconds, medians over the window that the last step completed, if it did."""

    @override
    def on_metrics(self, step: FinishedStep) -> None:
        if self.saw_step(step.state.step, step.metrics.own_seconds, step.metrics.wall_seconds) and self._stops:
            step.stop_cause = STRAGGLER
        if self._medians is not None:
            step.measured["rank_seconds"] = _name_slowest(self._medians)

    def saw_step(self, step: int, own_seconds: Sequence[float], step_seconds: float) -> list[Straggler]:
        """Count a step with the own times of all ranks; return those that are found slow after this one."""
        self._window.append((np.asarray(own_seconds, np.float64), step_seconds))
        self._medians = None
        if len(self._window) < _WINDOW_STEPS:
            return []
        middle = _WINDOW_STEPS // 2  # of an odd number of steps
        medians = np.partition(np.stack([times for times, _ in self._window], 1), middle, axis=1)[:, middle]
        whole = statistics.median(seconds for _, seconds in self._window)
        self._window.clear()
        self._medians = medians if len(medians) > 1 else None
        usual = median_of_peers(medians, self._stages)
        is_slow = (medians >= _SLOWER * usual) & (medians - usual >= _SHARE_OF_STEP * whole)
        self._in_a_row = np.where(is_slow, self._in_a_row + 1, 0)
        stragglers = [
            Straggler(step, rank, self._hosts[rank], float(medians[rank]), float(usual[rank]), whole)
            for rank in np.flatnonzero(self._in_a_row == _NUM_WINDOWS).tolist()
        ]
        for slow in stragglers:
            self._tell(slow)
        return stragglers


def _name_slowest(medians: NDArray[np.float64]) -> dict[str, float]:
    """The seconds of the slowest ranks, by rank, and the median of all; without it where all are named."""
    slowest = np.sort(np.argsort(-medians, kind="stable")[:_NAMED_RANKS]).tolist()
    row = {str(rank): float(f"{medians[rank]:.4g}") for rank in slowest}
    return row if len(medians) == len(row) else {**row, "median": float(f"{np.median(medians):.4g}")}


def build_straggler_watch(meshes: Meshes, reaction: str, slow_path: Path, journal: "Journal | None") -> Monitor:
    """Build the watch, which does nothing but on rank 0. `reaction`: `fault.on_straggler`. Collective.

    `slow_path`: the file by which rank 0 tells the agent of its machine which rank's machine a spare may replace.
    """
    hosts = gather_objects(platform.node(), meshes.everyone)
    if journal is None:
        return Monitor()
    stages = [meshes.grid.place(rank)["pp"] for rank in range(meshes.num_devices)]

    def tell(slow: Straggler) -> None:
        if reaction == "replace":
            write_text(slow_path, str(slow.rank))
        logger.warning(slow.describe())
        with suppress(OSError):  # the disk may be full
            journal.event("straggler", message=slow.describe(), **asdict(slow))

    return StragglerWatch(hosts, stages, reaction == "stop", tell)
