"""A rank that lives on when another one is lost: with `fault.on_lost_process: replace`.

All ranks train in a process group until one of them is lost. The others then leave the group, but keep their processes
with what these have imported, compiled and hold in memory. When a new process has taken the place of the lost one, all
form the next group, and go on from the newest snapshot in memory, or else from the newest checkpoint.
"""

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from typing_extensions import override

from echelon.ground.hosts import limit_silence_of
from echelon.ground.launch_environment import LastEnd
from echelon.ground.variables import Place
from echelon.learn.checkpoint.snapshot import SnapshotsByStep
from echelon.learn.distributed.mesh import ViewChanged
from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS, leave_groups
from echelon.learn.distributed.torch_internals import count_groups_anew, find_backends, list_groups, set_timeout
from echelon.learn.distributed.transport import end_waits
from echelon.planner.plan import load_plan
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.lifecycle.rank_run import conduct
from echelon.run.lifecycle.replica import LivingProcess, Wait
from echelon.run.lifecycle.view_group import CONNECT_SECONDS, LossWatch, ViewStore, raise_change
from echelon.run.supervise.board import MembershipStore, View
from echelon.run.supervise.outcome import LOST_SECONDS, SAME_FAILURES
from echelon.run.training.callbacks import build_callbacks

logger = logging.getLogger(__name__)

# The mark on the board of a plan that has trained.
_TRIED = "tried", "plan"


@dataclass
class KeptRank(LivingProcess):
    """A rank of a run whose lost processes are replaced, while the others wait."""

    _held: SnapshotsByStep = field(default_factory=SnapshotsByStep)
    _MOST_IN_VAIN = SAME_FAILURES

    @override
    def _train_until(self, board: MembershipStore, store: Store, view: View, wait: Wait) -> int | None:
        with RankGroup(board, store, view, self.place, self._transport.backend) as group:
            return self._train_in(group, self._recipe, wait)

    def _train_in(self, group: "RankGroup", recipe: Recipe, wait: Wait) -> int | None:
        """Train in a group; None when the run has ended, else the number of finished steps. Collective."""
        trainer, runtime = None, self._runtime(self.place.rank, self.place.world_size)
        is_first = runtime.rank == 0
        try:
            group.form()
            wait.end()
            heartbeat = self.build_heartbeat(runtime)
            trainer = build_trainer(
                recipe,
                load_plan(self.folder.plan_path),  # the first rehearsal may have changed it
                self.folder,
                runtime,
                stop=self.stop,
                heartbeat=heartbeat,
                callbacks=build_callbacks(recipe.train.callbacks) if is_first else (),
                memory=self._held,
                loss=group.find_loss() if is_first else None,
                is_known=group.board.is_marked(*_TRIED),
            )
            group.board.mark("trains", self.member)
            dist.barrier()
            if is_first:
                group.board.mark(*_TRIED)
                record_losses(self.folder, group.board, group.view, trainer.state.step)
            conduct(trainer, recipe, self.folder, self.stop, heartbeat, group.raise_loss)
            if group.board.await_end(group.view, is_first):
                return None
        except BaseException as error:
            wait.end()
            with suppress(ViewChanged):
                group.raise_loss(error)
                raise
        group.close()
        if trainer is None:
            return -1
        trainer.saver.store.drop()
        if trainer.saver.snapshots is not None:
            trainer.saver.snapshots.drop()
        return trainer.state.step


@dataclass
class RankGroup:
    """The process groups of all ranks until one of them is lost."""

    board: MembershipStore
    store: Store
    view: View
    place: Place
    backend: str
    _closing: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "RankGroup":
        """Begin to watch for losses."""
        self._watch = LossWatch(self._is_over, self.close)
        return self

    def form(self) -> None:
        """Form the default process group. Collective. Raises ViewChanged, or an error, if a rank is lost meanwhile."""
        place, timeout = self.place, timedelta(seconds=CONNECT_SECONDS)
        # torch does not refer to a store that is a Python object.
        self._store = ViewStore(PrefixStore(f"ranks/{self.view.number}", self.store), self._is_over)
        count_groups_anew()
        dist.init_process_group(
            self.backend, store=self._store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
        assert dist.group.WORLD is not None
        for group_backend in find_backends(dist.group.WORLD):
            set_timeout(group_backend, COLLECTIVE_SECONDS)
        if not place.is_one_machine:
            limit_silence_of(None, LOST_SECONDS)

    def _is_over(self) -> bool:
        return self.board.is_over(self.view.number)

    def find_loss(self) -> LastEnd | None:
        """When the first process was lost that is replaced in this group; None in the first group of a job."""
        times = [change.time for change in self.board.find_changes(self.view.number) if change.reason is not None]
        return LastEnd(min(times), None) if times else None

    def raise_loss(self, error: BaseException) -> None:
        """Raise ViewChanged if an error comes from a loss; see `raise_change`."""
        raise_change(error, self._is_over, self.place.is_one_machine)

    def close(self) -> None:
        """End all waits in the groups, here and in the other processes. Not collective."""
        with self._closing:
            end_waits(list_groups())

    def __exit__(self, *error: object) -> None:
        """Leave the groups, of which the caller must have dropped what it built in them."""
        if dist.is_initialized():
            leave_groups()
        self._watch.leave()


def record_losses(folder: RunFolder, board: MembershipStore, view: View, step: int) -> None:
    """Log the processes that were lost and are replaced, and write their events. On rank 0, before the next step.

    `step`: the number of complete steps.
    """
    now = time.time()
    for change in board.find_changes(view.number):
        if change.reason is not None:
            seconds = now - change.time
            fields = {"rank": change.replica, "pid": change.pid, "reason": change.reason, "seconds": seconds}
            with suppress(OSError):  # the disk may be full
                folder.rows.append_event("process_lost", step=step, **fields)
            logger.warning(
                f"failure: rank {change.replica} (pid {change.pid}) {change.reason}; a new process has taken its "
                f"place, and all go on after step {step}, {seconds:.1f} s later"
            )
    board.tell_recorded(view.number)
