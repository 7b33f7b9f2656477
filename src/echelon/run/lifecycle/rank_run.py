"""Runs a rank's training to its last step, and does what follows it: the adapter, the records, the last lines."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from echelon.ground.errors import StoppedError
from echelon.ground.sizes import render_bytes
from echelon.ground.stop_request import StopRequest, read_stop_file
from echelon.ground.variables import find_cache_dir, read_environment
from echelon.learn.distributed.mesh import ViewChanged
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.model.compilation import compilations_told, describe_graph_breaks, describe_recompiles
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.journal import Journal
from echelon.run.journal.network import describe_network
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.lifecycle.run_records import describe_end, finish
from echelon.run.supervise.outcome import LEAVING_VARIABLE
from echelon.run.training.callbacks import Callback
from echelon.run.training.heartbeat import Heartbeat
from echelon.run.training.state import TrainState
from echelon.run.training.trainer import Trainer

logger = logging.getLogger(__name__)

# The part of the notice kept for closing trackers and ending processes after the last upload was given up.
_LEAVING_SECONDS = 5.0


def run_training(
    recipe: Recipe,
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    stop: StopRequest,
    heartbeat: Heartbeat,
    callbacks: Sequence[Callback] = (),
) -> TrainState:
    """Train in this rank until the run's last step, from the newest checkpoint if there is one. Collective.

    Raises StoppedError when a rank was asked to stop. `heartbeat` watches from the first step to the last.
    """
    trainer = build_trainer(recipe, plan, folder, runtime, stop=stop, heartbeat=heartbeat, callbacks=callbacks)
    return conduct(trainer, recipe, folder, stop, heartbeat)


def conduct(
    trainer: Trainer,
    recipe: Recipe,
    folder: RunFolder,
    stop: StopRequest,
    heartbeat: Heartbeat,
    raise_change: Callable[[BaseException], None] | None = None,
) -> TrainState:
    """Train to the run's last step, and do what follows it. Collective. Raises the errors of `run_training`.

    Raises ViewChanged as well, where processes may be lost: then their group has ended. `raise_change` raises it for an
    error that comes from a loss.
    """
    journal, store = trainer.accounting.journal, trainer.saver.store
    meshes = trainer.train_step.learner.meshes

    def time_left() -> float:
        return stop.seconds_left(recipe.fault.notice_seconds) - _LEAVING_SECONDS

    done = False
    heartbeat.start()
    if journal is not None and journal.meter is not None:
        journal.meter.watch(stop, lambda: store.write_seconds)
    try:
        with compilations_told(heartbeat.rest, heartbeat.resume):
            state = trainer.fit()
        heartbeat.stop()
        if recipe.adapter.is_adapter:
            export_trained(trainer, recipe, folder)
        measured = trainer.train_step.learner.engine.describe_end()
        if trainer.saver.snapshots is not None:
            trainer.saver.snapshots.close()
        store.close(time_left)
        if journal is not None:
            journal.flush()
            summarize(trainer, journal, folder)
            journal.measured([*filter(None, (describe_recompiles(), describe_graph_breaks())), *measured])
        done = True
        if meshes.is_first:
            finish(trainer, folder)
        if journal is not None:
            cost = None if journal.meter is None else journal.meter.describe_usd()
            seconds = trainer.accounting.goodput.wall_seconds
            for line in describe_end(folder, state, seconds, cost, recipe):
                logger.info(line)
    except StoppedError:
        store.close(time_left)
        raise
    except BaseException as error:
        if raise_change is not None:
            raise_change(error)
        store.abandon()
        raise
    finally:
        heartbeat.stop()
        trainer.train_step.loader.close()
        if journal is not None:
            _close_records(trainer, journal, folder, done, stop)
    return state


def goes_on(folder: RunFolder, stop: StopRequest) -> bool:
    """Whether the ranks end only because a machine joins or leaves: then nobody has told this one to stop."""
    is_signal = stop.agreed is not None and stop.agreed.startswith("SIG")
    return read_environment().get(LEAVING_VARIABLE) == "1" and is_signal and read_stop_file(folder.stop_path) is None


def _close_records(trainer: Trainer, journal: Journal, folder: RunFolder, done: bool, stop: StopRequest) -> None:
    """Close the journal, after the goodput of a start that did not reach the last step. On rank 0."""
    if isinstance(sys.exception(), ViewChanged):  # the run goes on
        if journal.meter is not None:
            journal.meter.close()
    elif not done:
        summarize(trainer, journal, folder, logging.DEBUG if goes_on(folder, stop) else logging.INFO)
    journal.close(done)


def export_trained(trainer: Trainer, recipe: Recipe, folder: RunFolder) -> None:
    """Write the adapter in PEFT's format to the run's export/ and compare it with the live weights. Collective.

    Raises:
        CheckpointError: on rank 0, the written weights differ from the trained ones.
    """
    # Here: no start waits for what only an end needs.
    from echelon.learn.checkpoint.adapter_folder import write_adapter
    from echelon.learn.checkpoint.model_card import render_card

    with trainer.train_step.sync.agreed():
        content = trainer.train_step.learner.engine.describe_adapter()
    if trainer.train_step.learner.meshes.is_first:
        card = render_card(folder.path, trainer.state.step, is_adapter=True)
        num_bytes = write_adapter(folder.export_dir, content, recipe.model.checkpoint, folder.model_dir, card)
        folder.rows.append_event("export", step=trainer.state.step, bytes=num_bytes)
        size = f"{render_bytes(num_bytes)} of weights, verified against the trained ones"
        logger.info(f"adapter: {folder.export_dir} ({size})")


def summarize(trainer: Trainer, journal: Journal, folder: RunFolder, level: int = logging.INFO) -> None:
    """Log the reckoning, the network and the goodput, and write them to events.jsonl, however this start ended.

    On rank 0.
    """
    # Here: no start waits for what only an end needs.
    from echelon.run.folder.reckoning import reckon, sharpen_later_plans, store_reckoning

    with suppress(OSError, ValueError):  # the disk may be full, a file damaged
        if (reckoning := reckon(folder)) is not None:
            for line in reckoning.describe():
                logger.log(level, line)
            store_reckoning(folder, reckoning, trainer.state.step)
            if (told := sharpen_later_plans(folder, reckoning, find_cache_dir())) is not None:
                logger.log(level, told)
    if journal.network is not None and (sent := journal.network.summarize()) is not None:
        logger.log(level, describe_network(sent))
        with suppress(OSError):  # the disk may be full
            journal.event("network", step=trainer.state.step, **sent)
    goodput = trainer.accounting.goodput
    logger.log(level, goodput.describe())
    if journal.meter is not None:
        journal.meter.close()
        if (used := journal.meter.describe()) is not None:
            logger.log(level, used)
    with suppress(OSError):  # the disk may be full
        folder.rows.append_event("goodput", step=trainer.state.step, seconds=goodput.state_dict()["seconds"])
