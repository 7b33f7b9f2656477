"""Assembles the trainer of a run around a learner, on one rank."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from echelon.ground.stop_request import StopRequest
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.learner import Learner
from echelon.planner.plan import ParallelPlan
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.lifecycle.accounts import build_monitors, open_accounting
from echelon.run.lifecycle.extension_checks import find_loop
from echelon.run.lifecycle.run_learner import build_run_learner
from echelon.run.lifecycle.saved_state import build_saver, restore
from echelon.run.training.evaluations import PromptSampler, build_evaluations
from echelon.run.training.heartbeat import Heartbeat
from echelon.run.training.loop_run import run_loop
from echelon.run.training.rollback import BadStepHandler
from echelon.run.training.trainer import Pauses, Trainer
from echelon.run.training.training_step import TrainingStep

if TYPE_CHECKING:
    from echelon.ground.launch_environment import LastEnd
    from echelon.learn.checkpoint.snapshot import SnapshotsByStep
    from echelon.recipe.document import Recipe
    from echelon.run.training.callbacks import Callback
    from echelon.run.training.replica_state import HeldState


def build_trainer(
    recipe: "Recipe",
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    compile_backend: str = "inductor",
    stop: StopRequest | None = None,
    heartbeat: Heartbeat | None = None,
    callbacks: Sequence["Callback"] = (),
    memory: "SnapshotsByStep | None" = None,
    loss: "LastEnd | None" = None,
    is_known: bool = False,
) -> Trainer:
    """Build a trainer with everything a run needs, rehearsed and loaded, ready for `fit`. Collective.

    `stop` and `heartbeat` are the stop request and the watchdog of hangs; by default there are none. `memory`: where
    this process holds snapshots, if it lives on when another rank is lost; `loss`: when the last one was. `is_known`:
    see `build_run_learner`.
    """
    recovery = RecoveryWatch(folder, loss) if runtime.rank == 0 else None
    is_first = runtime.rank == 0
    learner = build_run_learner(recipe, plan, folder, runtime, compile_backend, is_first, is_known=is_known)
    return assemble(learner, folder, runtime, recovery, stop, heartbeat, callbacks, memory=memory)


def assemble(
    learner: Learner,
    folder: RunFolder,
    runtime: Runtime,
    recovery: RecoveryWatch | None,
    stop: StopRequest | None = None,
    heartbeat: Heartbeat | None = None,
    callbacks: Sequence["Callback"] = (),
    held: "HeldState | None" = None,
    memory: "SnapshotsByStep | None" = None,
) -> Trainer:
    """Build a trainer around a learner, and load the newest checkpoint, or the state of a replica. Collective.

    Args:
        recovery: on rank 0, what measures a recovery.
        held: what this replica holds from an earlier view; None if it holds nothing.
        memory: where this process holds snapshots; None if it does not.
    """
    recipe, stop, heartbeat = learner.recipe, stop or StopRequest(), heartbeat or Heartbeat()
    # A save is tested, and the newest state is loaded, before anything of this start is written.
    restored = restore(learner, folder, runtime, held, memory)
    sync = restored.contents.sync
    sampler = PromptSampler(learner) if recipe.evaluate.prompts else None
    feed = learner.open_feed()
    judge = None
    if recipe.draws_answers:
        from echelon.learn.answers.judging import AnswerJudge  # rewards may start processes and load models

        judge = AnswerJudge(learner, folder.hub_path)
        if learner.memory is not None and restored.held is None:
            whole = learner.memory.frozen_models + judge.frozen_bytes
            learner.memory = replace(learner.memory, frozen_models=whole)
    accounting = open_accounting(learner, feed, folder, runtime, recovery, restored, heartbeat, sampler)
    if restored.held is not None:
        stop.agreed = restored.held.stopped_by
    saver = build_saver(learner, restored, accounting)
    step = TrainingStep(learner, sync, restored.contents.judge, feed, stop)
    evaluations = build_evaluations(learner, sync, sampler, accounting, stop, judge)
    trainer = Trainer(
        step,
        accounting,
        Pauses(learner, saver, evaluations, accounting, stop),
        saver,
        BadStepHandler(recipe.fault, step, saver, accounting),
        restored.state,
    )
    accounting.monitors = build_monitors(learner, folder, runtime, accounting, saver)
    accounting.callbacks = callbacks if accounting.journal is not None else ()
    if recipe.loop is not None:
        trainer.loop = partial(run_loop, find_loop(recipe.loop), judge)
    if restored.held is not None:  # a group of replicas ended before this work was done
        trainer.owes_pause, trainer.owes_save = restored.held.owes_pause, restored.held.owes_save
    return trainer
