"""A process that goes on when another one is lost: that of a replica, which may be a worker of parameter servers.

The processes of a replica build its engine among themselves, then join the others in a view, train there until the view
ends, and join the next one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import override

from echelon.ground.errors import LaunchError, TrainingError
from echelon.ground.launch_environment import is_gpu_private
from echelon.ground.stop_request import StopRequest
from echelon.ground.variables import Place
from echelon.learn.distributed.mesh import ViewChanged
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.distributed.transport import choose_transport
from echelon.planner.plan import load_plan
from echelon.planner.replica_limits import resize
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.lifecycle.assemble import assemble
from echelon.run.lifecycle.rank_run import conduct
from echelon.run.lifecycle.run_learner import build_run_learner
from echelon.run.lifecycle.run_records import record_changes
from echelon.run.lifecycle.view_group import Inside, ViewMembership, form_inside, join_board, join_replicas
from echelon.run.supervise.board import FIRST_MEMBER, MembershipStore, View, split_member
from echelon.run.training.callbacks import build_callbacks
from echelon.run.training.heartbeat import Heartbeat
from echelon.run.training.replica_state import HeldState, hold
from echelon.run.training.trainer import Trainer


@dataclass
class LivingProcess(ABC):
    """A process of a run that goes on when another one is lost: it trains in one view after the other.

    Attributes:
        place: its place among all processes.
        member: the name of this process.
        build_heartbeat: builds the watchdog of hangs of a view.
    """

    folder: RunFolder
    place: Place
    member: str
    stop: StopRequest
    build_heartbeat: Callable[[Runtime], Heartbeat]
    # So many views in a row may end before a step was finished in one of them.
    _MOST_IN_VAIN: ClassVar[int]

    def __post_init__(self) -> None:
        """Read the recipe, and find what this process sends over."""
        self._recipe = load_recipe(self.folder.recipe_path)[0]
        self._transport = choose_transport(self.place, is_gpu_private())

    def train(self) -> None:
        """Train until the run has ended.

        Raises StoppedError when a process was asked to stop, and the run is saved; LaunchError, which restarts all,
        when losses leave it no time to advance; or another error of a training.
        """
        board, store = self._begin()
        board.tell_ready(self.member)
        number, furthest, num_in_vain = -1, -1, 0
        wait = Wait(self.folder, self.stop, self._recipe.fault.notice_seconds)
        while True:
            view = board.await_view(number, self.member, wait.look)
            number = view.number
            if (step := self._train_until(board, store, view, wait)) is None:
                return
            num_in_vain = 0 if step > furthest else num_in_vain + 1
            furthest = max(furthest, step)
            if num_in_vain == self._MOST_IN_VAIN:
                raise LaunchError(
                    f"a process was lost {num_in_vain} times in a row before the run came beyond step "
                    f"{max(0, furthest)}; {self.folder.events_path} and the logs in {self.folder.logs_dir} say which."
                )
            rank = view.members.index(self.member)
            wait.begin(self.build_heartbeat(self._runtime(rank, len(view.members))))

    def _begin(self) -> tuple[MembershipStore, Store]:
        """Join the keeper's board, and do once what needs no other replica."""
        return join_board()

    @abstractmethod
    def _train_until(self, board: MembershipStore, store: Store, view: View, wait: "Wait") -> int | None:
        """Train in a view; None when the run has ended, else the number of finished steps. Collective."""

    def _runtime(self, rank: int, size: int) -> Runtime:
        place, device, backend = self.place, self._transport.device, self._transport.backend
        return Runtime(rank, size, place.local_rank, place.local_world_size, device, backend)


@dataclass
class ReplicaProcess(LivingProcess):
    """A process of a replica that the others go on without, until it is back.

    `show` makes this process write to the user's console, as the first rank of a view does.
    """

    show: Callable[[], None]
    _held: HeldState | None = None
    _MOST_IN_VAIN = 21

    @override
    def _begin(self) -> tuple[MembershipStore, Store]:
        board, store = join_board()
        plan, (start, index) = load_plan(self.folder.plan_path), split_member(self.member)
        form_inside(store, start, index, plan.replica_size, self._transport.backend)
        runtime, number = self._runtime(index, plan.replica_size), self.place.rank // plan.replica_size
        is_first, single = self.member == FIRST_MEMBER, resize(plan, 1)
        self._learner = build_run_learner(self._recipe, single, self.folder, runtime, "inductor", is_first, number)
        self._inside = Inside()
        return board, store

    @override
    def _train_until(self, board: MembershipStore, store: Store, view: View, wait: "Wait") -> int | None:
        size, num_essential = dist.get_world_size(), self._recipe.sync.num_essential
        membership = ViewMembership(
            board, store, view, self.member, self.place.world_size // size, self._inside, num_essential,
            self.place.is_one_machine, self._transport,
        )  # fmt: skip
        is_done = self._train_in(membership, wait)
        membership.leave()
        if is_done:
            return None
        self._learner.engine.discard()
        return -1 if self._held is None else self._held.saved.train.step

    def _train_in(self, membership: ViewMembership, wait: "Wait") -> bool:
        """Train in a view, and hold what this replica has then; return whether the run has ended. Collective."""
        trainer = None
        try:
            trainer = self._join(membership, wait)
            watchdog = trainer.accounting.heartbeat
            conduct(trainer, self._recipe, self.folder, self.stop, watchdog, membership.raise_change)
            if membership.await_end():
                return True
        except ViewChanged:
            pass
        membership.end()
        if trainer is not None:
            trainer.saver.store.drop()
            self._held = hold(trainer)
        elif self._held is not None and not self._held.is_whole:
            self._held = None  # a replica that was a step behind may have a part of the newer state
        return False

    def _join(self, membership: ViewMembership, wait: "Wait") -> Trainer:
        """Form the groups of a view and build the trainer in it. Collective. Raises ViewChanged if it ends."""
        learner, plan = self._learner, resize(self._learner.plan, membership.size)
        try:
            everyone, outer = membership.form_groups()
            wait.end()
            runtime = self._runtime(membership.rank, plan.world_size)
            meshes = join_replicas(learner.meshes, plan, everyone, outer, membership)
            learner.engine.regroup(meshes)
            recovery, callbacks = None, []
            if membership.rank == 0:
                self.show()
                recovery, callbacks = RecoveryWatch(self.folder), build_callbacks(learner.recipe.train.callbacks)
            watchdog, learner = self.build_heartbeat(runtime), replace(learner, plan=plan, meshes=meshes)
            trainer = assemble(learner, self.folder, runtime, recovery, self.stop, watchdog, callbacks, self._held)
            membership.board.mark("trains", self.member)
            dist.barrier(everyone)
        except BaseException as error:
            membership.raise_change(error)
            raise
        finally:
            wait.end()
        if membership.rank == 0:  # now the keeper can spare any other replica
            record_changes(self.folder, membership, trainer.state.step, plan.sync.name)
        return trainer


class Wait:
    """The time between two views, from the end of one to the process group of the next: watched like a step."""

    def __init__(self, folder: RunFolder, stop: StopRequest, notice_seconds: float) -> None:
        """`notice_seconds`: how long after a request to stop this replica may wait, to save with the others."""
        self._folder = folder
        self._stop = stop
        self._notice_seconds = notice_seconds
        self._heartbeat: Heartbeat | None = None
        self._is_resting = False

    def begin(self, heartbeat: Heartbeat) -> None:
        """Begin to wait for the next view, watched by `heartbeat`. The first view has a limit of its own."""
        self._heartbeat, self._is_resting = heartbeat, False
        heartbeat.beat("the wait for the other replicas")
        heartbeat.start()

    def look(self) -> None:
        """Do not count the time in which a lost replica starts again, without which the others may not train.

        Raises TrainingError when the notice of a stop has passed.
        """
        if self._stop.seconds_left(self._notice_seconds) <= 0:
            raise TrainingError(
                f"stopped by {self._stop.name} while this replica waited for the others; the steps since the newest "
                "checkpoint are lost; start the same command again to resume"
            )
        is_awaited = self._folder.awaited_path.exists()
        if self._heartbeat is not None and is_awaited != self._is_resting:
            self._is_resting = is_awaited
            if is_awaited:
                self._heartbeat.rest()
            else:
                self._heartbeat.resume()

    def end(self) -> None:
        """End the wait."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
