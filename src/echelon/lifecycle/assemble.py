"""Builds a trainer from a recipe and a plan on one rank."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from echelon.data.feed import Feed, describe_source, find_place, like_source, open_feed
from echelon.data.loader import Microbatch, choose_padding
from echelon.data.prepared import PreparedData, open_prepared
from echelon.distributed.mesh import Meshes, build_mesh
from echelon.distributed.runtime import Runtime
from echelon.engines import Engine, EngineSpec, Rehearsal, build_engine
from echelon.hardware.detection import describe_peak, find_peak_flops
from echelon.inference.evaluate import DEFAULT_BATCHES, Evaluator, read_in_order
from echelon.inference.sampler import PromptSampler
from echelon.lifecycle.fitting import build_rehearsed, note_memory, pin_plan
from echelon.lifecycle.journaling import (
    describe_training,
    open_goodput,
    open_journal,
    record_beginning,
    record_changes,
)
from echelon.lifecycle.saved_state import build_snapshots, build_store, load_newest
from echelon.lifecycle.view_group import ViewMembership
from echelon.model.adapters import find_new_tokens
from echelon.model.build import resolve_config
from echelon.model.hub import read_commits, with_copies
from echelon.model.model_folder import find_stops, write_model_folder
from echelon.objectives.objective import Objective, build_objective
from echelon.planner.memory import MemoryParts, describe_peak_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe import Recipe
from echelon.recipe.schedule import build_schedule
from echelon.reporting.goodput import GoodputTracker
from echelon.reporting.journal import Journal
from echelon.reporting.recovery import RecoveryWatch
from echelon.runs.run_folder import RunFolder
from echelon.stopping import StopRequest
from echelon.sync import build_synchronizer
from echelon.training.accounting import Accounting
from echelon.training.bad_steps import StepJudge
from echelon.training.callbacks import Callback
from echelon.training.contents import RunContents
from echelon.training.evaluations import Evaluations
from echelon.training.healing import Held, heal
from echelon.training.heartbeat import Heartbeat
from echelon.training.interval import SaveInterval
from echelon.training.pauses import Pauses
from echelon.training.profiler import build_recorder
from echelon.training.rollback import Recovery, find_suppressed
from echelon.training.saving import Saver
from echelon.training.state import SavedState, TrainState
from echelon.training.straggler import build_straggler_watch
from echelon.training.trainer import Trainer
from echelon.training.training_step import TrainingStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """What a rank has before it reads a checkpoint; the engine has initial weights, and has rehearsed a step."""

    recipe: Recipe
    plan: ParallelPlan
    data: PreparedData
    config: PretrainedConfig
    objective: Objective
    shape: ModelShape
    engine: Engine
    memory: MemoryParts | None


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
    meshes = build_mesh(plan, runtime.device.type, runtime.is_one_machine)
    built = build_engines(recipe, plan, folder, runtime, meshes, compile_backend, is_first=runtime.rank == 0)
    return assemble(built, folder, runtime, meshes, recovery, stop, heart, callbacks)


def build_engines(
    recipe: Recipe,
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    meshes: Meshes,
    compile_backend: str,
    is_first: bool,
) -> Built:
    """Open the data, build the engine, and rehearse a step. Collective.

    `is_first`: whether this rank writes the model's folder, and the plan if the rehearsal changes it.
    """
    device = runtime.device
    prepared, wanted = folder.text.read_prepared_path(), recipe.data
    data = open_prepared(prepared, wanted.sequence_len, wanted.document_mask, was_opened=True)
    here = with_copies(recipe, read_commits(folder.hub_path))
    config = resolve_config(here, data.vocab_size, data.tokenizer)
    if is_first:
        write_model_folder(folder.model_dir, config, data.tokenizer, data.manifest.stops)
    objective, new_tokens = build_objective(recipe.objective), find_new_tokens(recipe, data.tokenizer)

    def build(fitting: ParallelPlan) -> Engine:
        spec = EngineSpec(here, config, fitting, meshes, device, compile_backend, new_tokens)
        return build_engine(replace(spec, needs_reference=objective.needs_reference))

    planned, shape = plan, build_shape(config.to_dict())

    def rehearse(engine: Engine, fitting: ParallelPlan) -> Rehearsal:
        sequences = _read_any(data, planned, meshes, device, fitting.micro_batch_size)
        microbatch = like_source(sequences, recipe, data, find_place(recipe, fitting, meshes))
        return engine.rehearse(microbatch, fitting.num_microbatches, objective)

    engine, plan, memory = build_rehearsed(build, rehearse, recipe, planned)
    if is_first:
        pin_plan(folder, planned, plan, shape, recipe.data.sequence_len, device)
    return Built(recipe, plan, data, config, objective, shape, engine, memory)


def assemble(
    built: Built,
    folder: RunFolder,
    runtime: Runtime,
    meshes: Meshes,
    recovery: RecoveryWatch | None,
    stop: StopRequest | None = None,
    heart: Heartbeat | None = None,
    callbacks: Sequence[Callback] = (),
    held: Held | None = None,
) -> Trainer:
    """Build a trainer around an engine, and load the newest checkpoint, or the state of a replica. Collective.

    Args:
        recovery: on rank 0, what measures a recovery.
        held: what this replica holds from an earlier view; None if it holds nothing.
    """
    recipe, plan, engine, data = built.recipe, built.plan, built.engine, built.data
    stop, heart, device = stop or StopRequest(), heart or Heartbeat(), runtime.device
    sync = build_synchronizer(recipe.sync, engine, meshes)
    contents = RunContents(engine, sync, StepJudge(recipe.fault, device), meshes)
    store = build_store(recipe, folder, meshes.membership)
    snapshots = build_snapshots(recipe, meshes.membership)
    tensors = contents.tensors()
    store.rehearse(tensors)
    snapshots.rehearse(tensors)
    held = None if meshes.membership is None else heal(contents, held)
    saved = load_newest(store, snapshots, contents, runtime) if held is None else held.saved
    state = TrainState() if saved is None else saved.train
    state = state.judged_by(recipe.evaluate.select_by).suppressing(find_suppressed(folder))
    loader = open_feed(recipe, data, find_place(recipe, plan, meshes))
    num_steps, num_samples = recipe.num_steps(data.train.num_samples), data.train.num_samples
    stops = find_stops(built.config, data.manifest.stops)
    sampler = build_sampler(recipe, data, stops, device)
    peak_flops = find_peak_flops(device, plan.precision.compute)
    journal, goodput = None, GoodputTracker()
    if recovery is not None:
        recovery.loaded()
        journal, goodput = _open_records(built, folder, runtime, meshes, recovery, saved, held, num_steps)
    elif held is not None and held.saved.goodput is not None:
        goodput.resume(held.saved.goodput, last_sign=0.0)
    find_mfu = _find_mfu(recipe, plan, built.shape, meshes, peak_flops)
    accounting = Accounting(device, recipe.train.log_every, find_mfu, goodput, heart, journal, callbacks)
    if held is not None:
        accounting.make_up(state.step, held.rows)
        stop.agreed = held.stopped_by
    elif recovery is not None:
        store.upload_newest(state.step, state.best_step if recipe.checkpoint.keep_best else None)
        _describe_beginning(built, meshes, device, loader, sampler, stops)
    interval = SaveInterval(recipe, num_samples, plan.world_size, state.step)
    saver = Saver(recipe, contents, store, snapshots, interval, accounting, meshes.everyone)
    schedule = build_schedule(recipe.optim, num_steps, recipe.batches)
    limit = recipe.optim.max_grad_norm
    step = TrainingStep(
        engine, built.objective, sync, contents.judge, schedule, loader, meshes, device, limit, stop, num_steps
    )
    evaluator = build_evaluator(recipe, plan, data, built.objective, meshes, device)
    evaluations = None
    if evaluator is not None:
        rhythm, select_by = recipe.evaluation_rhythm(num_samples), recipe.evaluate.select_by
        evaluations = Evaluations(
            engine, built.objective, sync, evaluator, sampler, rhythm, select_by, accounting, stop
        )
    every, patience = recipe.fault.verify_replicas_every, recipe.evaluate.early_stopping
    pauses = Pauses(engine, saver, evaluations, accounting, meshes, stop, every, patience)
    recover = Recovery(recipe.fault, step, saver, accounting)
    owes_pause, owes_save = (False, False) if held is None else (held.owes_pause, held.owes_save)
    recorder = build_recorder(recipe.profile, folder, runtime, heart.resting)
    stragglers = build_straggler_watch(meshes, recipe.fault.on_straggler == "stop")
    return Trainer(
        num_steps, step, accounting, pauses, saver, recover, stop, state, recorder, stragglers, owes_pause, owes_save
    )


def _open_records(
    built: Built,
    folder: RunFolder,
    runtime: Runtime,
    meshes: Meshes,
    recovery: RecoveryWatch,
    saved: SavedState | None,
    held: Held | None,
    num_steps: int,
) -> tuple[Journal, GoodputTracker]:
    """Open the journal and the goodput of the run on rank 0, and record this start, or the replicas that changed."""
    recipe, plan, device = built.recipe, built.plan, runtime.device
    step = 0 if saved is None else saved.train.step
    if held is not None and held.owes_pause:
        saved = replace(held.saved, train=replace(held.saved.train, owes_evaluation=True))
    goodput = open_goodput(folder, saved)
    if held is None:
        record_beginning(folder, step, built.data, find_peak_flops(device, plan.precision.compute))
    shows_mfu = device.type != "cpu" or logger.isEnabledFor(logging.DEBUG)
    watch = recovery if held is None else None  # a loss of replicas is no restart
    journal = open_journal(recipe, folder, runtime, num_steps, step, watch, shows_mfu)
    if held is None:
        note_memory(journal, step, plan, built.shape, recipe.data.sequence_len, device, built.memory)
    elif isinstance(meshes.membership, ViewMembership):
        record_changes(folder, meshes.membership, step, recipe.sync.name)
    return journal, goodput


def _describe_beginning(
    built: Built,
    meshes: Meshes,
    device: torch.device,
    loader: Feed,
    sampler: PromptSampler | None,
    stops: Sequence[int],
) -> None:
    """Log lines about the training. On rank 0."""
    recipe, plan, compute = built.recipe, built.plan, built.plan.precision.compute
    for line in (
        *describe_training(recipe, plan, built.config, built.data, stops),
        *describe_source(recipe, loader),
        *built.engine.describe(_read_any(built.data, plan, meshes, device, 1).documents is not None),
        *(() if sampler is None else (sampler.describe(),)),
    ):
        logger.info(line)
    told = describe_peak_memory(device.type == "cuda")
    logger.info(f"peak_mem in the lines below: {told}; the memory of a plan is that of its tensors alone")
    peak = find_peak_flops(device, compute) / 1e12
    level = logging.INFO if device.type != "cpu" else logging.DEBUG
    logger.log(level, f"mfu: relative to {peak:.3g} TFLOP/s per process, {describe_peak(device)}")


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
    return read_in_order(data.train, 0, num_sequences, stop, padding).cut(meshes.sequence_part).to(device)
