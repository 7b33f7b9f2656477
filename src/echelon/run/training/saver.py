"""Saves during training: what a checkpoint contains, when it is due, and the last save before a stop."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.ground.errors import StoppedError
from echelon.ground.sizes import render_duration
from echelon.ground.stop_request import LIMITS, STRAGGLER
from echelon.learn.checkpoint.folder import Checkpoint
from echelon.learn.checkpoint.snapshot import PeerMemory
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.engines import Engine
from echelon.learn.sync import Synchronizer
from echelon.learn.sync.synchronizer import StateFill
from echelon.planner.reliability import best_interval_seconds, lost_fractions
from echelon.recipe.document import Recipe
from echelon.run.folder.cost import name_limit
from echelon.run.journal.goodput import GoodputTracker
from echelon.run.training.bad_steps import StepJudge
from echelon.run.training.callbacks import FinishedStep, Monitor
from echelon.run.training.run_log import Accounting
from echelon.run.training.state import SavedState, TrainState

logger = logging.getLogger(__name__)

# Grattafiori et al., "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54
# days on 16,384 GPUs, which is one per 50,676 GPU hours.
DEVICE_HOURS_BETWEEN_FAILURES = 50_000.0

# The first save with `auto`, after enough steps to measure their time.
_FIRST_STEPS = 10
_RECENT_STEPS = 50
# Relative change of the interval from which on it is logged.
_ANNOUNCED_CHANGE = 0.2


@dataclass
class LoopContents:
    """What a loop of `train.loop` keeps between two steps, as JSON values."""

    describe: Callable[[], dict[str, Any]] = dict
    """Called when a checkpoint is saved, on every rank."""
    loaded: dict[str, Any] = field(default_factory=dict)
    """What was saved with the checkpoint that the run goes on from."""


@dataclass(frozen=True)
class RunContents:
    """The parts of a run that are saved in a checkpoint, other than counters. Every method is collective."""

    engine: Engine
    sync: Synchronizer
    judge: StepJudge
    meshes: Meshes
    loop: LoopContents = field(default_factory=LoopContents)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of a checkpoint: the engine's and the synchronizer's."""
        return self.sync.tensors(self.engine.state_dict())

    def describe(self, state: TrainState, goodput: GoodputTracker) -> dict[str, Any]:
        """Return the content that is not a tensor, as JSON values."""
        return {
            "train": state.to_dict(),
            "sync": self.sync.state_dict(),
            "judges": self._gather_judges(),
            "goodput": goodput.state_dict(),
            "loop": self.loop.describe(),
        }

    def load(self, state: dict[str, Any], fill: StateFill) -> SavedState:
        """Load a checkpoint into every part; return its content that is not a tensor.

        `state`: that content, as JSON values. `fill`: fills tensors from the checkpoint.

        Raises:
            CheckpointError: it is hostile, or does not belong to this run. The run cannot continue after this.
        """
        saved = SavedState.from_dict(state)
        self.sync.load_state_dict(saved.sync)
        self.loop.loaded = saved.loop
        self.engine.load(lambda tensors: self.sync.load(tensors, fill))
        judges = saved.judges
        self.judge.load_state_dict(asdict(judges[self.meshes.place["replica"] % len(judges)]))
        return saved

    def _gather_judges(self) -> list[dict[str, Any]]:
        """Return the state of each model's judge: one, or that of each replica. Collective."""
        state, outer = self.judge.state_dict(), self.meshes.outer
        return [state] if outer is None or self.meshes.is_one_model else gather_objects(state, outer)


class SaveInterval(Monitor):
    """Decides after which steps the run is saved, the same on every rank."""

    def __init__(self, recipe: Recipe, num_samples: int, num_devices: int, step: int) -> None:
        """`num_samples`: sequences per epoch. `step`: steps already done.

        With `auto` the first save of a start comes early, to measure its cost.
        """
        self._rhythm = None if recipe.checkpoint.every == "auto" else recipe.save_rhythm(num_samples)
        hours = recipe.fault.mean_hours_between_failures
        self._failure_seconds = 3600 * (hours or DEVICE_HOURS_BETWEEN_FAILURES / num_devices)
        self._next = step + _FIRST_STEPS
        self._announced = 0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def is_due(self, done: int) -> bool:
        """Whether a save is due after this number of steps."""
        return self._rhythm.is_due(done) if self._rhythm is not None else done >= self._next

    @override
    def on_metrics(self, step: FinishedStep) -> None:
        self._step_seconds.append(step.seconds)

    def learn(self, done: int, stall_seconds: float, write_seconds: float, group: dist.ProcessGroup) -> str | None:
        """After a save, choose the next one; return a line for the user if the interval has changed. Collective.

        Args:
            done: the step that was saved.
            stall_seconds: how long the save blocked training on this rank.
            write_seconds: how long the previous save took until it was published; 0 if there was none.
            group: all ranks. The slowest rank determines the interval.
        """
        if self._rhythm is not None:
            return None
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        step_seconds = statistics.median(self._step_seconds)
        slowest = torch.tensor([stall_seconds, write_seconds, step_seconds], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        stall, write, step = slowest.tolist()
        # With a shorter interval than the writing time, saves would wait for each other.
        seconds = max(best_interval_seconds(stall, self._failure_seconds), write)
        every = max(1, math.ceil(seconds / step))
        self._next = done + every
        if abs(every - self._announced) <= _ANNOUNCED_CHANGE * self._announced:
            return None
        self._announced = every
        return self._describe(every, every * step, stall)

    def _describe(self, every: int, seconds: float, stall: float) -> str:
        saving, redone = lost_fractions(seconds, stall, self._failure_seconds)
        return (
            f"checkpoint.every auto: every {every} steps ({render_duration(seconds)}): a save blocks training for "
            f"{stall:.2f} s, and a failure is expected every {render_duration(self._failure_seconds)}; expected loss "
            f"of time {100 * (saving + redone):.2g} %: {100 * saving:.2g} % saving, {100 * redone:.2g} % repeated work"
        )


class Saver:
    """Decides when a run is saved, and saves it. Every method is collective.

    `save` and the methods that call it raise CheckpointError at the third consecutive failure.
    """

    def __init__(
        self,
        recipe: Recipe,
        contents: RunContents,
        store: CheckpointStore,
        snapshots: PeerMemory | None,
        interval: SaveInterval,
        accounting: Accounting,
        everyone: dist.ProcessGroup,
    ) -> None:
        self.contents = contents
        self.store = store
        self.snapshots = snapshots
        self.keeps_best = recipe.checkpoint.keep_best
        self._budget = recipe.budget
        self._notice_seconds = recipe.fault.notice_seconds
        self.interval = interval
        self._accounting = accounting
        self._everyone = everyone
        self._has_warned = False

    def agree_on_save(self, done: int) -> bool:
        """Whether a checkpoint is due after this step, by the interval or as the retry of a failed save.

        Must be called once after every step, by every rank: after some of them ranks communicate about a pending save.
        """
        return self.interval.is_due(done) or self.store.agree_on_retry(done)

    def save(self, state: TrainState) -> None:
        """Save a checkpoint in the background."""
        keep = state.best_step if self.keeps_best else None
        described = self.contents.describe(state, self._accounting.goodput)
        self.store.save(state.step, self.contents.tensors(), described, keep)
        self._accounting.tell("on_save", state.step)

    def save_and_learn(self, state: TrainState) -> None:
        """Save between two steps, and report the cost to the save interval."""
        started = time.monotonic()
        with self._accounting.pausing("saving"):
            self.save(state)
        stall = time.monotonic() - started
        news = self.interval.learn(state.step, stall, self.store.write_seconds or 0.0, self._everyone)
        if news is not None:
            logger.info(news)
        self._warn_of_slow_saves()

    def save_snapshot(self, state: TrainState, snapshots: PeerMemory) -> None:
        """Take a snapshot in the background."""
        with self._accounting.pausing("saving"):
            described = self.contents.describe(state, self._accounting.goodput)
            snapshots.save(state.step, self.contents.tensors(), described)

    def settle(self, state: TrainState) -> None:
        """Wait until the newest save is complete, retrying it if it failed: a run must end with a checkpoint."""
        with self._accounting.pausing("saving"):
            self._await_whole(state)

    def save_and_leave(self, state: TrainState, cause: str) -> NoReturn:
        """Save, wait until it is complete, and raise StoppedError. `cause`: a signal, a limit, or that of a monitor."""
        started = time.monotonic()
        self._accounting.goodput.turn("saving")
        self._accounting.goodput.stop()
        with self._accounting.heartbeat.resting_together():
            self.save(state)
            self._await_whole(state)
        remark = ""
        if cause in LIMITS:
            cause, remark = name_limit(self._budget, cause), "; raise it to continue"
        elif cause == STRAGGLER:
            remark = "; replace the slow machine, and start the same command again"
        elif cause.startswith("SIG"):
            remark = f" of the {self._notice_seconds:g} s allowed by fault.notice_seconds"
        seconds = time.monotonic() - started
        raise StoppedError(f"stopped by {cause} at step {state.step}, saved in {seconds:.1f} s{remark}")

    def load(self, checkpoint: Checkpoint) -> SavedState:
        """Load a checkpoint. See RunContents.load."""
        return self.contents.load(checkpoint.read_state(), partial(self.store.load, checkpoint))

    def _await_whole(self, state: TrainState) -> None:
        while not self.store.wait():
            self.save(state)

    def _warn_of_slow_saves(self) -> None:
        """Warn once if a save takes longer than the notice before a stop."""
        notice, taken = self._notice_seconds, self.store.write_seconds
        if taken is not None and 0 < notice < taken and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"Writing a checkpoint took {taken:.1f} s, longer than fault.notice_seconds={notice:g}: a stop by a "
                "signal may kill the run before it is saved; save to a faster disk, or raise fault.notice_seconds if "
                "the sender of the signal waits longer."
            )
