"""Saves during training: checkpoints and snapshots, and the last save before a stop."""

import logging
import time
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from echelon.ground.errors import StoppedError
from echelon.ground.stop_request import LIMITS, STRAGGLER
from echelon.learn.checkpoint.folder import Checkpoint
from echelon.learn.checkpoint.snapshot import PeerMemory, Snapshots
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.recipe.document import Recipe
from echelon.run.folder.cost import name_limit
from echelon.run.training.contents import RunContents
from echelon.run.training.interval import SaveInterval
from echelon.run.training.run_log import Accounting
from echelon.run.training.state import SavedState, TrainState

logger = logging.getLogger(__name__)


class Saver:
    """Decides when a run is saved, and saves it. Every method except `snapshot_due` and `saw_step` is collective.

    `save` and the methods that call it raise CheckpointError at the third consecutive failure.
    """

    def __init__(
        self,
        recipe: Recipe,
        contents: RunContents,
        store: CheckpointStore,
        snapshots: Snapshots | PeerMemory,
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
        self._interval = interval
        self._accounting = accounting
        self._everyone = everyone
        self._has_warned = False

    def agree_on_save(self, done: int) -> bool:
        """Whether a checkpoint is due after this step, by the interval or as the retry of a failed save.

        Must be called once after every step, by every rank: after some steps the ranks communicate about a pending
        save.
        """
        return self._interval.is_due(done) or self.store.agree_on_retry(done)

    def snapshot_due(self, done: int) -> bool:
        """Whether a snapshot is due after this step."""
        return self.snapshots.is_due(done)

    def saw_step(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._interval.saw_step(seconds)

    def save(self, state: TrainState) -> None:
        """Save a checkpoint in the background."""
        keep = state.best_step if self.keeps_best else None
        described = self.contents.describe(state, self._accounting.goodput)
        self.store.save(state.step, self.contents.tensors(), described, keep)
        self._accounting.tell_save(state.step)

    def save_and_learn(self, state: TrainState) -> None:
        """Save between two steps, and report the cost to the save interval."""
        started = time.monotonic()
        with self._accounting.pausing("saving"):
            self.save(state)
        stall = time.monotonic() - started
        news = self._interval.learn(state.step, stall, self.store.write_seconds or 0.0, self._everyone)
        if news is not None:
            logger.info(news)
        self._warn_of_slow_saves()

    def save_snapshot(self, state: TrainState) -> None:
        """Take a snapshot in the background."""
        with self._accounting.pausing("saving"):
            described = self.contents.describe(state, self._accounting.goodput)
            self.snapshots.save(state.step, self.contents.tensors(), described)

    def settle(self, state: TrainState) -> None:
        """Wait until the newest save is complete, retrying it if it failed: a run must end with a checkpoint."""
        with self._accounting.pausing("saving"):
            self._await_whole(state)

    def save_and_leave(self, state: TrainState, cause: str) -> NoReturn:
        """Save, wait until it is complete, and raise StoppedError. `cause`: a signal, or the limit that is reached."""
        started = time.monotonic()
        self._accounting.goodput.turn("saving")
        self._accounting.goodput.stop()
        with self._accounting.heartbeat.resting_together():
            self.save(state)
            self._await_whole(state)
        if cause in LIMITS:
            cause, remark = name_limit(self._budget, cause), "; raise it to continue"
        elif cause == STRAGGLER:
            remark = "; replace the slow machine, and start the same command again"
        else:
            remark = f" of the {self._notice_seconds:g} s allowed by fault.notice_seconds"
        seconds = time.monotonic() - started
        raise StoppedError(f"stopped by {cause} at step {state.step}, saved in {seconds:.1f} s{remark}")

    def wait(self) -> None:
        """Wait until the pending save has ended."""
        self.store.wait()

    def find_newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, the same on every rank."""
        return self.store.newest()

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
