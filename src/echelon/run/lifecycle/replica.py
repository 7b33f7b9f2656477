"""A process of a replica of a quorum, or a worker of parameter servers: it goes on when another replica is lost.

The processes of a replica build its engine among themselves, then join the others in a view, train there until the view
ends, and join the next one.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from echelon.ground.errors import LaunchError, TrainingError
from echelon.ground.launch_environment import is_gpu_private
from echelon.ground.stop_request import StopRequest
from echelon.ground.variables import Place
from echelon.learn.distributed.joint_group import join_replicas
from echelon.learn.distributed.membership import ViewChanged
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.distributed.transport import ON_CPU, Transport, choose_transport
from echelon.learn.learner import Learner
from echelon.planner.plan import ParallelPlan, load_plan
from echelon.planner.replica_limits import resize
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.lifecycle.assemble import assemble
from echelon.run.lifecycle.rank_run import conduct
from echelon.run.lifecycle.run_learner import build_run_learner
from echelon.run.lifecycle.run_records import record_changes
from echelon.run.lifecycle.view_group import Inside, ViewMembership, form_inside, join_board
from echelon.run.supervise.board import FIRST_MEMBER, split_member
from echelon.run.training.callbacks import build_callbacks
from echelon.run.training.heartbeat import Heartbeat
from echelon.run.training.replica_state import HeldState, hold
from echelon.run.training.trainer import Trainer

logger = logging.getLogger(__name__)

# So many views in a row may end before a step was finished in one of them.
_MAX_FRUITLESS_VIEWS = 20


@dataclass
class ReplicaProcess:
    """A process of a replica of a run, from its start to the end of the run.

    Attributes:
        place: its place among the processes of all replicas.
        member: the name of this process.
        build_heart: builds the watchdog of hangs of a view.
        show: makes this process write to the user's console, as the first rank of a view does.
    """

    folder: RunFolder
    place: Place
    member: str
    stop: StopRequest
    build_heartbeat: Callable[[Runtime], Heartbeat]
    show: Callable[[], None]
    _transport: Transport = ON_CPU

    def train(self) -> None:
        """Train until the run has ended, in one view after the other.

        Raises StoppedError when a replica was asked to stop, and the run is saved; or another error of a training.
        """
        recipe, plan = load_recipe(self.folder.recipe_path)[0], load_plan(self.folder.plan_path)
        board, store = join_board()
        start, index = split_member(self.member)
        self._transport = choose_transport(self.place, is_gpu_private())
        form_inside(store, start, index, plan.replica_size, self._transport.backend)
        learner = self._build(recipe, plan)
        inside = Inside()
        board.tell_ready(self.member)
        held, number, num_fruitless = None, -1, 0
        wait = Wait(self.folder, self.stop, recipe.fault.notice_seconds)
        while True:
            view = board.await_view(number, self.member, wait.look)
            num_essential = recipe.sync.num_essential
            num_replicas = self.place.world_size // plan.replica_size
            is_spread = self.place.local_world_size < self.place.world_size
            membership = ViewMembership(
                board, store, view, self.member, num_replicas, inside, num_essential, is_spread, self._transport
            )
            number, before = view.number, held
            is_done, held = self._train_in(membership, learner, held, wait)
            membership.leave()
            if is_done:
                return
            num_fruitless = num_fruitless + 1 if _has_same_step(before, held) else 0
            if num_fruitless > _MAX_FRUITLESS_VIEWS:
                raise LaunchError(
                    f"{num_fruitless} groups of replicas in a row ended before they had finished a step; the logs of "
                    f"the replicas in {self.folder.logs_dir} and {self.folder.events_path} say which were lost."
                )
            wait.begin(self.build_heartbeat(self._runtime(membership.rank, len(view.members))))
            learner.engine.discard()

    def _train_in(
        self, membership: ViewMembership, learner: Learner, held: HeldState | None, wait: "Wait"
    ) -> tuple[bool, HeldState | None]:
        """Train in a view; return whether the run has ended, and what this replica holds. Collective."""
        trainer = None
        try:
            trainer = self._join(membership, learner, held, wait)
            heartbeat = trainer.accounting.heartbeat
            conduct(trainer, learner.recipe, self.folder, self.stop, heartbeat, membership.raise_change)
            if membership.await_end():
                return True, None
        except ViewChanged:
            pass
        membership.end()
        if trainer is None:  # a replica that was a step behind may have a part of the newer state
            return False, held if held is not None and held.is_whole else None
        trainer.saver.store.drop()
        trainer.saver.snapshots.drop()
        return False, hold(trainer)

    def _build(self, recipe: Recipe, plan: ParallelPlan) -> Learner:
        """Build the learner, among the processes of this replica."""
        alone, runtime = resize(plan, 1), self._runtime(dist.get_rank(), plan.replica_size)
        is_first, number = self.member == FIRST_MEMBER, self.place.rank // plan.replica_size
        return build_run_learner(recipe, alone, self.folder, runtime, "inductor", is_first, number)

    def _join(self, membership: ViewMembership, learner: Learner, held: HeldState | None, wait: "Wait") -> Trainer:
        """Form the groups of a view and build the trainer in it. Collective. Raises ViewChanged if it ends."""
        recipe, plan = learner.recipe, resize(learner.plan, membership.size)
        try:
            everyone, outer = membership.form_groups()
            wait.end()
            runtime = self._runtime(membership.rank, plan.world_size)
            meshes = join_replicas(learner.meshes, plan, everyone, outer, membership)
            learner.engine.regroup(meshes)
            recovery = None
            if membership.rank == 0:
                self.show()
                recovery = RecoveryWatch(self.folder)
            heartbeat = self.build_heartbeat(runtime)
            callbacks = build_callbacks(recipe.train.callbacks) if membership.rank == 0 else ()
            resized = replace(learner, plan=plan, meshes=meshes)
            trainer = assemble(resized, self.folder, runtime, recovery, self.stop, heartbeat, callbacks, held)
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

    def _runtime(self, rank: int, size: int) -> Runtime:
        place, device, backend = self.place, self._transport.device, self._transport.backend
        return Runtime(rank, size, place.local_rank, place.local_world_size, device, backend)


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


def _has_same_step(before: HeldState | None, after: HeldState | None) -> bool:
    """Whether no step was finished between two moments."""
    return (before and before.saved.train.step) == (after and after.saved.train.step)
