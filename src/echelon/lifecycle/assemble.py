"""Builds a trainer from a recipe and a plan on one rank, and runs it."""

import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from echelon.checkpoint.adapter_folder import write_adapter
from echelon.checkpoint.carrier import Carrier
from echelon.checkpoint.model_card import render_card
from echelon.checkpoint.snapshot import Snapshots
from echelon.checkpoint.store import CheckpointStore
from echelon.checkpoint.upload import Uploader
from echelon.data.loader import BatchLoader, Microbatch, choose_padding, find_cut
from echelon.data.mixture import build_order
from echelon.data.prepared import PreparedData, open_prepared
from echelon.distributed.mesh import Meshes, build_mesh
from echelon.distributed.runtime import Runtime
from echelon.engines import Engine, build_engine
from echelon.errors import StoppedError
from echelon.hardware.detection import describe_peak, find_peak_flops
from echelon.inference.evaluate import DEFAULT_BATCHES, Evaluator, read_in_order
from echelon.inference.sampler import PromptSampler
from echelon.lifecycle.fitting import build_rehearsed, note_memory, pin_plan
from echelon.lifecycle.journaling import describe_end, describe_training, open_goodput, open_journal
from echelon.model.adapters import find_new_tokens
from echelon.model.build import resolve_config
from echelon.model.hub import read_commits, with_copies
from echelon.model.model_folder import find_stops, write_model_folder
from echelon.objectives.objective import Objective, build_objective
from echelon.parallel.compilation import describe_recompiles
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe import Recipe
from echelon.recipe.schedule import build_schedule
from echelon.reporting.goodput import GoodputTracker
from echelon.reporting.journal import Journal
from echelon.reporting.recovery import RecoveryWatch
from echelon.runs.reckoning import reckon, store_reckoning
from echelon.runs.run_folder import RunFolder
from echelon.sizes import render_bytes
from echelon.stopping import StopRequest
from echelon.supervise.launch_environment import (
    find_host_dir,
    find_snapshot_dir,
    shares_files,
)
from echelon.sync import build_synchronizer
from echelon.training.accounting import Accounting
from echelon.training.bad_steps import StepJudge
from echelon.training.callbacks import Callback
from echelon.training.contents import RunContents
from echelon.training.evaluations import Evaluations
from echelon.training.heartbeat import Heartbeat
from echelon.training.interval import SaveInterval
from echelon.training.pauses import Pauses
from echelon.training.profiler import build_recorder
from echelon.training.rollback import Recovery, find_suppressed
from echelon.training.saving import Saver
from echelon.training.state import SavedState, TrainState
from echelon.training.trainer import Trainer
from echelon.training.training_step import TrainingStep

logger = logging.getLogger(__name__)

# The part of the notice kept for closing trackers and ending processes after the last upload was given up.
_LEAVING_SECONDS = 5.0


def run_training(
    recipe: Recipe,
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    stop: StopRequest,
    heart: Heartbeat,
    callbacks: Sequence[Callback] = (),
) -> TrainState:
    """Train in this rank until the run's last step, from the newest checkpoint if there is one. Collective.

    Raises StoppedError when a rank was asked to stop. `heart` watches from the first step to the last.
    """
    trainer = build_trainer(recipe, plan, folder, runtime, stop=stop, heart=heart, callbacks=callbacks)
    journal, store = trainer.accounting.journal, trainer.saver.store

    def time_left() -> float:
        return stop.seconds_left(recipe.fault.notice_seconds) - _LEAVING_SECONDS

    done = False
    heart.start()
    if journal is not None and journal.meter is not None:
        journal.meter.watch(stop, lambda: store.write_seconds)
    try:
        state = trainer.fit()
        if recipe.adapter.is_adapter:
            export_trained(trainer, recipe, folder)
        measured = trainer.train_step.engine.describe_end()
        heart.stop()
        trainer.saver.snapshots.close()
        store.close(time_left)
        if journal is not None:
            journal.flush()
            summarize(trainer, journal, folder)
            if (recompiles := describe_recompiles()) is not None:
                logger.info(recompiles)
            for line in (*journal.memory_lines, *measured):
                logger.info(line)
        done = True
        if runtime.rank == 0:
            finish(trainer, folder)
        if journal is not None:
            usd = None if journal.meter is None else journal.meter.usd
            for line in describe_end(folder, state, trainer.accounting.goodput.wall_seconds, usd):
                logger.info(line)
    except StoppedError:
        store.close(time_left)
        raise
    except BaseException:
        store.abandon()
        raise
    finally:
        heart.stop()
        trainer.train_step.loader.close()
        if journal is not None:
            if not done:
                summarize(trainer, journal, folder)
            journal.close(done)
    return state


def export_trained(trainer: Trainer, recipe: Recipe, folder: RunFolder) -> None:
    """Write the adapter in PEFT's format to the run's export/ and compare it with the live weights. Collective.

    Raises:
        CheckpointError: on rank 0, the written weights differ from the trained ones.
    """
    with trainer.train_step.sync.agreed():
        content = trainer.train_step.engine.describe_adapter()
    if dist.get_rank() == 0:
        card = render_card(folder.path, trainer.state.step, is_adapter=True)
        num_bytes = write_adapter(folder.export_dir, content, recipe.model.checkpoint, folder.model_dir, card)
        folder.rows.append_event("export", step=trainer.state.step, bytes=num_bytes)
        size = f"{render_bytes(num_bytes)} of weights, verified against the trained ones"
        logger.info(f"adapter: {folder.export_dir} ({size})")


def summarize(trainer: Trainer, journal: Journal, folder: RunFolder) -> None:
    """Print the reckoning and the goodput and write them to events.jsonl, however this start ended. On rank 0."""
    with suppress(OSError, ValueError):  # the disk may be full, a file damaged
        if (reckoning := reckon(folder)) is not None:
            for line in reckoning.describe():
                logger.info(line)
            store_reckoning(folder, reckoning, trainer.state.step)
    goodput = trainer.accounting.goodput
    logger.info(goodput.describe())
    if journal.meter is not None:
        journal.meter.close()
        if (used := journal.meter.describe()) is not None:
            logger.info(used)
    with suppress(OSError):  # the disk may be full
        folder.rows.append_event("goodput", step=trainer.state.step, seconds=goodput.state_dict()["seconds"])


def finish(trainer: Trainer, folder: RunFolder) -> None:
    """Record that the run reached its last step, or ended by early stopping."""
    state = trainer.state
    if state.step == trainer.num_steps or not trainer.stopped_early:
        folder.rows.append_event("done", step=state.step)
        folder.mark_finished(state.step)
        return
    numbers = {
        "best_step": state.best_step,
        "best_loss": state.best_loss,
        "evaluations_since_best": state.evaluations_since_best,
    }
    folder.rows.append_event("early_stop", step=state.step, **numbers)
    folder.mark_finished(state.step, "early_stop")
    best = (
        "none was finite"
        if state.best_loss is None
        else f"the lowest was {state.best_loss:.4f} at step {state.best_step}"
    )
    logger.info(
        f"early stopping at step {state.step}: no lower loss in {state.evaluations_since_best} evaluations; {best}",
    )


def build_trainer(
    recipe: Recipe,
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    compile_backend: str = "inductor",
    stop: StopRequest | None = None,
    heart: Heartbeat | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Build a trainer with everything a run needs, rehearsed and loaded, ready for `fit`. Collective.

    `stop` and `heart` are the stop request and the watchdog of hangs; by default there are none.
    """
    recovery = RecoveryWatch(folder) if runtime.rank == 0 else None
    stop, heart, device = stop or StopRequest(), heart or Heartbeat(), runtime.device
    meshes = build_mesh(plan, device.type)
    prepared, wanted = folder.text.read_prepared_path(), recipe.data
    data = open_prepared(prepared, wanted.sequence_len, wanted.document_mask, was_opened=True)
    here = with_copies(recipe, read_commits(folder))
    config = resolve_config(here, data.vocab_size, data.tokenizer)
    if runtime.rank == 0:
        write_model_folder(folder.model_dir, config, data.tokenizer, data.manifest.stops)
    objective, new_tokens = build_objective(recipe.objective), find_new_tokens(recipe, data.tokenizer)

    def build(fitting: ParallelPlan) -> Engine:
        return build_engine(here, config, fitting, meshes, objective, device, compile_backend, new_tokens)

    planned, shape = plan, build_shape(config.to_dict())
    engine, plan, memory = build_rehearsed(build, partial(_read_any, data, plan, meshes, device), recipe, planned)
    if runtime.rank == 0:
        pin_plan(folder, planned, plan, shape, recipe.data.sequence_len, device)
    sync = build_synchronizer(recipe.sync, engine, meshes)
    contents = RunContents(engine, sync, StepJudge(recipe.fault, device), meshes)
    store, snapshots = build_store(recipe, folder), build_snapshots(recipe)
    tensors = contents.tensors()
    store.rehearse(tensors)
    snapshots.rehearse(tensors)
    saved = load_newest(store, snapshots, contents, runtime)
    state = TrainState() if saved is None else saved.train
    state = state.judged_by(recipe.evaluate.select_by).suppressing(find_suppressed(folder))
    num_steps, num_samples = recipe.num_steps(data.train.num_samples), data.train.num_samples
    stops = find_stops(config, data.manifest.stops)
    sampler = build_sampler(recipe, data, stops, device)
    peak_flops = find_peak_flops(device, plan.precision.compute)
    journal, goodput = None, GoodputTracker()
    if recovery is not None:
        recovery.loaded()
        goodput = open_goodput(folder, saved)
        store.upload_newest(state.step, state.best_step if recipe.checkpoint.keep_best else None)
        _record_beginning(folder, state.step, data, peak_flops)
        shows_mfu = device.type != "cpu" or logger.isEnabledFor(logging.DEBUG)
        journal = open_journal(recipe, folder, runtime, num_steps, state.step, recovery, shows_mfu)
        note_memory(journal, state.step, plan, shape, recipe.data.sequence_len, device, memory)
        mfu_line = f"mfu: relative to {peak_flops / 1e12:.3g} TFLOP/s per process, {describe_peak(device)}"
        for line in (
            *describe_training(recipe, plan, config, data, stops),
            *engine.describe(_read_any(data, plan, meshes, device, 1).documents is not None),
            *(() if sampler is None else (sampler.describe(),)),
        ):
            logger.info(line)
        logger.log(logging.INFO if shows_mfu else logging.DEBUG, mfu_line)
    find_mfu = _find_mfu(recipe, plan, shape, meshes, peak_flops)
    accounting = Accounting(device, recipe.train.log_every, find_mfu, goodput, heart, journal, callbacks)
    interval = SaveInterval(recipe, num_samples, plan.world_size, state.step)
    saver = Saver(recipe, contents, store, snapshots, interval, accounting, meshes.everyone)
    loader = build_loader(recipe, plan, data, meshes, state.step)
    schedule = build_schedule(recipe.optim, num_steps, recipe.batches)
    limit, judge = recipe.optim.max_grad_norm, contents.judge
    step = TrainingStep(engine, objective, sync, judge, schedule, loader, meshes, device, limit, stop, num_steps)
    evaluator = build_evaluator(recipe, plan, data, objective, meshes, device)
    evaluations = None
    if evaluator is not None:
        rhythm, select_by = recipe.evaluation_rhythm(num_samples), recipe.evaluate.select_by
        evaluations = Evaluations(engine, sync, evaluator, sampler, rhythm, select_by, accounting, stop)
    every, patience = recipe.fault.verify_replicas_every, recipe.evaluate.early_stopping
    pauses = Pauses(engine, saver, evaluations, accounting, meshes, stop, every, patience)
    recover = Recovery(recipe.fault, step, saver, accounting)
    recorder = build_recorder(recipe.profile, folder, runtime)
    return Trainer(num_steps, step, accounting, pauses, saver, recover, stop, state, recorder)


def _record_beginning(folder: RunFolder, step: int, data: PreparedData, peak_flops: float) -> None:
    text = {"prepared": str(data.path), "digest": data.content_digest, "packing": data.is_packed}
    machine = {"host": platform.node(), "pids": dict(sorted(folder.read_pids().items()))}
    folder.rows.append_event("resume" if step else "start", step=step, peak_flops=peak_flops, **machine, **text)


def _find_mfu(
    recipe: Recipe, plan: ParallelPlan, shape: ModelShape, meshes: Meshes, peak_flops: float
) -> Callable[[float], float]:
    """The model FLOPs utilization as a function of the tokens per second of all ranks."""
    return partial(
        shape.mfu,
        num_devices=meshes.num_devices,
        peak_flops=peak_flops,
        sequence_len=recipe.data.sequence_len,
        num_trained=None if plan.adapter is None else plan.adapter.num_trained_matmul_parameters,
    )


def build_store(recipe: Recipe, folder: RunFolder) -> CheckpointStore:
    """The run's checkpoint store, which writes an event for each save and logs faults. Collective."""
    keep_last, asynchronous = recipe.checkpoint.keep_last, recipe.checkpoint.asynchronous

    uploads = None
    if recipe.checkpoint.remote is not None and dist.get_rank() == 0:
        uploads = Uploader(recipe.checkpoint.remote, folder, keep_last, folder.rows.append_event)

    def carry(group: dist.ProcessGroup) -> Carrier:
        # Outside the run folder, which may be copied while it is written (SageMaker), including partial files.
        return Carrier(str(find_host_dir()), recipe.prepared_dir / ".carried", group)

    return CheckpointStore(
        folder.checkpoints_dir,
        keep_last,
        asynchronous,
        folder.rows.append_event,
        uploads,
        None if shares_files() else carry,
    )


def build_snapshots(recipe: Recipe) -> Snapshots:
    """The run's snapshots, if the recipe enables them. Collective."""
    every_steps = recipe.checkpoint.snapshot_every_steps
    return Snapshots(find_snapshot_dir(), every_steps)


def load_newest(
    store: CheckpointStore,
    snapshots: Snapshots,
    contents: RunContents,
    runtime: Runtime,
) -> SavedState | None:
    """Load `contents` from the newest whole checkpoint or snapshot; returns its saved state, or None. Collective."""
    snapshot = snapshots.newest()
    checkpoint = store.newest(beyond=-1 if snapshot is None else snapshot.step) or snapshot
    if checkpoint is None:
        return None
    saved = contents.load(checkpoint, store)
    if runtime.rank == 0:
        held = ", a snapshot in memory" if checkpoint == snapshot else ""
        logger.info(f"Resuming from {checkpoint.path.name}{held}.")
    return saved


def build_loader(
    recipe: Recipe, plan: ParallelPlan, data: PreparedData, meshes: Meshes, start_step: int
) -> BatchLoader:
    """The loader of this rank's batches, from `start_step` on."""
    return BatchLoader(
        data.train,
        build_order(recipe, data.train),
        recipe.batches,
        plan.micro_batch_size,
        dp_rank=meshes.data_rank,
        dp_size=meshes.data_size,
        start_step=start_step,
        pin_memory=meshes.device_type == "cuda",
        padding=choose_padding(plan),
        cut=find_cut(meshes.sequence_part),
    )


def build_evaluator(
    recipe: Recipe,
    plan: ParallelPlan,
    data: PreparedData,
    objective: Objective,
    meshes: Meshes,
    device: torch.device,
) -> Evaluator | None:
    """The evaluator, if there is held-out text: `evaluate.batches` global batches of each set, or the first 200."""
    if not data.validation:
        return None
    num_sequences = (recipe.evaluate.batches or DEFAULT_BATCHES) * recipe.global_batch_size
    padding = choose_padding(plan)
    return Evaluator(data.validation, objective, num_sequences, plan.micro_batch_size, meshes, device, padding)


def build_sampler(
    recipe: Recipe, data: PreparedData, stops: Sequence[int], device: torch.device
) -> PromptSampler | None:
    """The sampler that continues `evaluate.prompts` at each evaluation, if there are any."""
    wanted = recipe.evaluate
    if not wanted.prompts:
        return None
    return PromptSampler(wanted.prompts, wanted.prompt_tokens, data.tokenizer, stops, recipe.run.seed, device)


def _read_any(
    data: PreparedData, plan: ParallelPlan, meshes: Meshes, device: torch.device, num_sequences: int
) -> Microbatch:
    stop, padding = data.train.num_samples, replace(choose_padding(plan), is_equal=True)
    return find_cut(meshes.sequence_part)(read_in_order(data.train, 0, num_sequences, stop, padding)).to(device)
