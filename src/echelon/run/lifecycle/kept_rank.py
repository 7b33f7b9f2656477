"""A rank that lives on when another one is lost: with `fault.on_lost_process: replace`.

All ranks train in a process group until one of them is lost. The others then leave the group, but keep their processes
with what these have imported, compiled and hold in memory. When a new process has taken the place of the lost one, all
form the next group, and go on from the newest snapshot in memory, or else from the newest checkpoint.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from echelon.ground.errors import LaunchError, StoppedError
from echelon.ground.hosts import limit_silence_of
from echelon.ground.launch_environment import LastEnd, is_gpu_private
from echelon.ground.stop_request import StopRequest
from echelon.ground.variables import Place
from echelon.learn.checkpoint.snapshot import SnapshotsByStep
from echelon.learn.distributed.membership import ViewChanged
from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS, Runtime, leave_groups
from echelon.learn.distributed.transport import ON_CPU, Transport, choose_transport, end_waits
from echelon.planner.plan import load_plan
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.lifecycle.rank_run import conduct
from echelon.run.lifecycle.replica import Wait
from echelon.run.lifecycle.view_group import CONNECT_SECONDS, LossWatch, ViewStore, join_board
from echelon.run.supervise.board import MembershipStore, View, await_true
from echelon.run.supervise.outcome import LOST_SECONDS, SAME_FAILURES, is_secondary
from echelon.run.training.callbacks import build_callbacks
from echelon.run.training.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

# The mark on the board of a plan that has trained.
_TRIED = "tried", "plan"
# How long the keeper may take to notice a death that this rank has met as an error; of a machine, once it is silent.
# Where the other one has reported an error instead, the keeper ends this rank meanwhile.
_NOTICE_SECONDS, _SHORT_NOTICE_SECONDS, _MACHINE_NOTICE_SECONDS = 30.0, 2.0, 30.0 + LOST_SECONDS


@dataclass
class KeptRank:
    """A process of a run, from its start to the end of the run.

    Attributes:
        place: its place in the job.
        member: the name of this process.
        build_heart: builds the watchdog of hangs of a group.
    """

    folder: RunFolder
    place: Place
    member: str
    stop: StopRequest
    build_heartbeat: Callable[[Runtime], Heartbeat]
    _held: SnapshotsByStep = field(default_factory=SnapshotsByStep)
    _transport: Transport = ON_CPU

    def train(self) -> None:
        """Train until the run has ended, in one group after the other.

        Raises StoppedError when a rank was asked to stop, and the run is saved; LaunchError, which restarts all, when
        losses leave it no time to advance; or another error of a training.
        """
        recipe, _ = load_recipe(self.folder.recipe_path)
        self._transport = choose_transport(self.place, is_gpu_private())
        board, store = join_board()
        board.tell_ready(self.member)
        number, furthest, num_in_vain = -1, -1, 0
        wait = Wait(self.folder, self.stop, recipe.fault.notice_seconds)
        while True:
            view = board.await_view(number, self.member, wait.look)
            number = view.number
            with RankGroup(board, store, view, self.place, self._transport.backend) as group:
                step = self._train_in(group, recipe, wait)
            if step is None:
                return
            num_in_vain = 0 if step > furthest else num_in_vain + 1
            furthest = max(furthest, step)
            if num_in_vain == SAME_FAILURES:
                raise LaunchError(
                    f"a process was lost {SAME_FAILURES} times in a row before the run came beyond step "
                    f"{max(0, furthest)}; {self.folder.events_path} and the logs in {self.folder.logs_dir} say which."
                )
            wait.begin(self.build_heartbeat(self._runtime()))

    def _train_in(self, group: "RankGroup", recipe: Recipe, wait: Wait) -> int | None:
        """Train in a group; None when the run has ended, else the number of finished steps. Collective."""
        trainer, runtime = None, self._runtime()
        is_first = runtime.rank == 0
        try:
            group.form()
            wait.end()
            is_known = group.board.is_marked(*_TRIED)
            loss = group.find_loss() if is_first else None
            callbacks = build_callbacks(recipe.train.callbacks) if is_first else ()
            heartbeat = self.build_heartbeat(runtime)
            trainer = build_trainer(
                recipe,
                load_plan(self.folder.plan_path),  # the first rehearsal may have changed it
                self.folder,
                runtime,
                stop=self.stop,
                heartbeat=heartbeat,
                callbacks=callbacks,
                memory=self._held,
                loss=loss,
                is_known=is_known,
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
        trainer.saver.snapshots.drop()
        return trainer.state.step

    def _runtime(self) -> Runtime:
        place, device, backend = self.place, self._transport.device, self._transport.backend
        return Runtime(place.rank, place.world_size, place.local_rank, place.local_world_size, device, backend)


class RankGroup:
    """The process groups of all ranks until one of them is lost."""

    def __init__(self, board: MembershipStore, store: Store, view: View, place: Place, backend: str) -> None:
        self.board = board
        self.view = view
        self._place = place
        self._backend = backend
        self._closing = threading.Lock()
        # torch does not refer to a store that is a Python object.
        self._store = ViewStore(PrefixStore(f"ranks/{view.number}", store), self._is_over)

    def __enter__(self) -> "RankGroup":
        """Begin to watch for losses."""
        self._watch = LossWatch(self._is_over, self.close)
        return self

    def form(self) -> None:
        """Form the default process group. Collective. Raises ViewChanged, or an error, if a rank is lost meanwhile."""
        place, timeout = self._place, timedelta(seconds=CONNECT_SECONDS)
        # torch finds the others by this number, which also counts a group that a loss has kept from being formed.
        c10d._world.group_count = 0
        dist.init_process_group(
            self._backend, store=self._store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
        assert dist.group.WORLD is not None
        for device in dist.group.WORLD._device_types:
            dist.group.WORLD._get_backend(device)._set_default_timeout(timedelta(seconds=COLLECTIVE_SECONDS))
        if self._is_spread:
            limit_silence_of(None, LOST_SECONDS)

    @property
    def _is_spread(self) -> bool:
        return self._place.local_world_size < self._place.world_size

    def _is_over(self) -> bool:
        return self.board.is_over(self.view.number)

    def find_loss(self) -> LastEnd | None:
        """When the first process was lost that is replaced in this group; None in the first group of a job."""
        times = [change.time for change in self.board.find_changes(self.view.number) if change.reason is not None]
        return LastEnd(min(times), None) if times else None

    def raise_loss(self, error: BaseException) -> None:
        """Raise ViewChanged if an error comes from a loss. Waits a moment for the keeper to notice it."""
        if isinstance(error, ViewChanged):
            raise error
        if isinstance(error, KeyboardInterrupt | SystemExit | StoppedError):
            return
        usual = _MACHINE_NOTICE_SECONDS if self._is_spread else _NOTICE_SECONDS
        if await_true(self._is_over, usual if is_secondary(error) else _SHORT_NOTICE_SECONDS):
            raise ViewChanged from error

    def close(self) -> None:
        """End all waits in the groups, here and in the other processes. Not collective."""
        with self._closing:
            end_waits(c10d._world.pg_map)

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
