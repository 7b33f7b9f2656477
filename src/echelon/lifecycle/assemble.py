"""Building a trainer from a recipe and a plan, in one rank, and running it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TextIO

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from echelon.checkpoint.adapter_folder import write_adapter
from echelon.checkpoint.carrier import Carrier
from echelon.checkpoint.model_card import render_card
from echelon.checkpoint.snapshot import Snapshots
from echelon.checkpoint.store import CheckpointStore
from echelon.checkpoint.upload import Uploader
from echelon.data.loader import BatchLoader, Microbatch
from echelon.data.mixture import build_order
from echelon.data.prepared import PreparedData, open_prepared
from echelon.distributed.mesh import Meshes, build_mesh
from echelon.distributed.runtime import Runtime
from echelon.engines import Engine, build_engine
from echelon.errors import StoppedError
from echelon.hardware.detection import describe_peak, find_peak_flops
from echelon.inference.evaluate import DEFAULT_BATCHES, Evaluator, read_in_order
from echelon.inference.sampler import PromptSampler
from echelon.model.adapters import find_new_tokens
from echelon.model.attention import describe_document_mask
from echelon.model.build import resolve_config
from echelon.model.hub import read_commits, with_copies
from echelon.model.model_folder import find_stops, write_model_folder
from echelon.objectives.objective import Objective, build_objective
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe import Recipe
from echelon.recipe.schedule import build_schedule
from echelon.reporting.budget import CostMeter
from echelon.reporting.goodput import GoodputTracker
from echelon.reporting.journal import Journal
from echelon.reporting.recovery import RecoveryWatch
from echelon.reporting.trackers import start_trackers
from echelon.runs.cost import find_price_here
from echelon.runs.run_folder import RunFolder
from echelon.stopping import StopRequest
from echelon.supervise.launch_environment import (
    find_host_dir,
    find_snapshot_dir,
    find_start,
    read_environment,
    shares_files,
)
from echelon.sync import Synchronizer, build_synchronizer
from echelon.training.bad_steps import StepJudge
from echelon.training.heartbeat import Heartbeat
from echelon.training.interval import SaveInterval
from echelon.training.replicas import describe_replicas
from echelon.training.rollback import find_suppressed, load_checkpoint
from echelon.training.state import GoodputState, SavedState, TrainState
from echelon.training.trainer import Trainer

# Of the notice: what closing trackers and ending the processes may take after the last upload was given up.
_LEAVING_SECONDS = 5.0

# The events of a run that came to its end.
_ENDS = ("done", "early_stop")


def run_training(
    recipe: Recipe,
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    console: TextIO,
    stop: StopRequest,
    heart: Heartbeat,
) -> TrainState:
    """Train in this rank until the run's last step, from the newest checkpoint if there is one. Collective.

    Raises StoppedError when a rank's `stop` was asked for. `heart` watches from the first step to the last.
    """
    trainer = build_trainer(recipe, plan, folder, runtime, console)
    trainer.stop, trainer.heart = stop, heart

    def time_left() -> float:
        return stop.seconds_left(recipe.fault.notice_seconds) - _LEAVING_SECONDS

    done = False
    heart.start()
    if trainer.journal is not None and trainer.journal.meter is not None:
        trainer.journal.meter.watch(stop, lambda: trainer.store.write_seconds)
    try:
        state = trainer.fit()
        if recipe.adapter.is_adapter:
            export_trained(trainer, recipe, folder, console)
        heart.stop()
        trainer.snapshots.close()
        trainer.store.close(time_left)
        if trainer.journal is not None:
            trainer.journal.flush()
            summarize(trainer, folder)
        done = True
        if runtime.rank == 0:
            finish(trainer, folder, console)
    except StoppedError:
        trainer.store.close(time_left)
        raise
    except BaseException:
        trainer.store.abandon()
        raise
    finally:
        heart.stop()
        trainer.loader.close()
        if trainer.journal is not None:
            if not done:
                summarize(trainer, folder)
            trainer.journal.close(done)
    return state


def export_trained(trainer: Trainer, recipe: Recipe, folder: RunFolder, console: TextIO) -> None:
    """Leave the adapter as PEFT writes it in the run's export/, compared with the live weights. Collective.

    Raises:
        CheckpointError: on rank 0, what can be read there is not what was trained.
    """
    content = trainer.engine.describe_adapter()
    if dist.get_rank() == 0:
        card = render_card(folder.path, trainer.state.step, is_adapter=True)
        num_bytes = write_adapter(folder.export_dir, content, recipe.model.checkpoint, folder.model_dir, card)
        folder.append_event("export", step=trainer.state.step, bytes=num_bytes)
        size = f"{num_bytes / 1e6:.2f} MB of weights, equal to those that were trained"
        write_line(console, f"adapter: {folder.export_dir} ({size})")


def summarize(trainer: Trainer, folder: RunFolder) -> None:
    """Say where the run's time went, and write it to events.jsonl, however this start of it ended. On rank 0."""
    assert trainer.journal is not None
    trainer.journal.say(trainer.goodput.describe())
    if trainer.journal.meter is not None:
        trainer.journal.meter.close()
        if (used := trainer.journal.meter.describe()) is not None:
            trainer.journal.say(used)
    with suppress(OSError):  # a full disk takes no event
        folder.append_event("goodput", step=trainer.state.step, seconds=trainer.goodput.state_dict()["seconds"])


def finish(trainer: Trainer, folder: RunFolder, console: TextIO) -> None:
    """Note that the run reached its last step, or stopped early for good."""
    state = trainer.state
    if state.step == trainer.num_steps or not trainer.stopped_early:
        folder.append_event("done", step=state.step)
        folder.mark_finished(state.step)
        return
    numbers = {
        "best_step": state.best_step,
        "best_loss": state.best_loss,
        "evaluations_since_best": state.evaluations_since_best,
    }
    folder.append_event("early_stop", step=state.step, **numbers)
    folder.mark_finished(state.step, "early_stop")
    best = (
        "none was finite"
        if state.best_loss is None
        else f"the lowest was {state.best_loss:.4f} at step {state.best_step}"
    )
    print(
        f"early stopping at step {state.step}: no lower loss in {state.evaluations_since_best} evaluations; {best}",
        file=console,
        flush=True,
    )


def build_trainer(
    recipe: Recipe,
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    console: TextIO,
    compile_backend: str = "inductor",
) -> Trainer:
    """Everything a run needs, rehearsed and loaded, ready for `fit`. Collective."""
    recovery = RecoveryWatch(folder, lambda line: write_line(console, line)) if runtime.rank == 0 else None
    device = runtime.device
    meshes = build_mesh(plan, device.type)
    data = open_prepared(folder.read_prepared_path(), recipe.data.sequence_len, recipe.data.document_mask)
    here = with_copies(recipe, read_commits(folder))
    config = resolve_config(here, data.vocab_size, data.tokenizer)
    if runtime.rank == 0:
        write_model_folder(folder.model_dir, config, data.tokenizer, data.manifest.stops)
    objective, new_tokens = build_objective(recipe.objective), find_new_tokens(recipe, data.tokenizer)
    engine = build_engine(here, config, plan, meshes, objective, device, compile_backend, new_tokens)
    sync = build_synchronizer(recipe.sync, engine, meshes)
    first = _any_microbatch(data, plan, device)
    engine.rehearse(first, plan.num_microbatches)
    store = build_store(recipe, folder, console)
    snapshots = build_snapshots(recipe, console)
    tensors = sync.tensors(engine.state_dict())
    store.rehearse(tensors)
    snapshots.rehearse(tensors)
    judge = StepJudge(recipe.fault, device)
    saved = load_newest(store, snapshots, engine, sync, judge, runtime, console)
    state = TrainState() if saved is None else saved.train
    state = state.judged_by(recipe.evaluate.select_by).suppressing(find_suppressed(folder))
    stops = find_stops(config, data.manifest.stops)
    sampler = build_sampler(recipe, data, stops, device)
    journal, goodput = None, GoodputTracker()
    num_steps = recipe.num_steps(data.train.num_samples)
    peak_flops = find_peak_flops(device, plan.precision.compute)
    if recovery is not None:
        recovery.loaded()
        goodput = open_goodput(folder, saved)
        store.upload_newest(state.step, state.best_step if recipe.checkpoint.keep_best else None)
        text = {"prepared": str(data.path), "digest": data.content_digest}
        folder.append_event("resume" if state.step else "start", step=state.step, peak_flops=peak_flops, **text)
        journal = Journal(folder, console, num_steps, recipe.train.log_every, recipe.batches)
        journal.tell_recovery(recovery)
        num_machines = -(-runtime.world_size // runtime.local_world_size)
        journal.meter = CostMeter(recipe, folder, find_price_here(recipe, read_environment()), num_machines)
        journal.add_forwarders(start_trackers(recipe, folder, state.step, journal.say))
        for line in (*_describe_model(config, recipe, data, stops, first.documents is not None), *engine.describe()):
            journal.say(line)
        journal.say(f"mfu: against {peak_flops / 1e12:.3g} TFLOP/s a process, {describe_peak(device)}")
        if sampler is not None:
            journal.say(sampler.describe())
        if recipe.fault.verify_replicas_every is not None:
            journal.say(describe_replicas(plan))
    return Trainer(
        recipe=recipe,
        num_steps=num_steps,
        engine=engine,
        objective=objective,
        sync=sync,
        judge=judge,
        schedule=build_schedule(recipe.optim, num_steps, recipe.batches),
        loader=build_loader(recipe, plan, data, meshes, state.step),
        evaluator=build_evaluator(recipe, plan, data, objective, meshes, device),
        evaluations=recipe.evaluation_rhythm(data.train.num_samples),
        sampler=sampler,
        store=store,
        snapshots=snapshots,
        meshes=meshes,
        device=device,
        shape=build_shape(config.to_dict()),
        num_trained=None if plan.adapter is None else plan.adapter.num_trained_matmul_parameters,
        peak_flops=peak_flops,
        journal=journal,
        interval=SaveInterval(recipe, data.train.num_samples, plan.world_size, state.step),
        state=state,
        goodput=goodput,
    )


def _describe_model(
    config: PretrainedConfig,
    recipe: Recipe,
    data: PreparedData,
    stops: Sequence[int],
    has_documents: bool,
) -> Iterator[str]:
    """Lines about the model that is trained: its special tokens and its masks."""
    special = f"pad {config.pad_token_id}, eos {config.eos_token_id}, bos {config.bos_token_id}"
    ends = [f"{each} ({data.tokenizer.convert_ids_to_tokens(each)})" for each in stops]
    yield f"tokens: {special}; generation stops at {', '.join(ends) or 'none'}"
    if has_documents:
        yield describe_document_mask(config, recipe.model.attn_implementation)


def open_goodput(folder: RunFolder, saved: SavedState | None) -> GoodputTracker:
    """Where the run's time went so far; cuts off the rows of lost steps, which tell how long those took. Rank 0."""
    written = folder.metrics_path.stat().st_mtime if folder.metrics_path.exists() else 0.0
    at = TrainState() if saved is None else saved.train
    num_cut = folder.cut_metrics(at.step, at.owes_evaluation)
    found = None if saved is None else saved.goodput
    events = [event for event in folder.read_events() if event["event"] in ("start", "resume", *_ENDS)]
    starts = [event["time"] for event in events if event["event"] == "start"]
    if found is None and starts:  # an earlier start came to no checkpoint
        found = GoodputState({}, min(starts), stopped=False)
    if found is None:
        return GoodputTracker(find_start(0.0))
    if events and events[-1]["event"] in _ENDS:  # the run had finished, and was given more steps later
        found = replace(found, stopped=True)
    opened = GoodputTracker(find_start(found.until))
    opened.resume(found, last_sign=written if num_cut else 0.0)
    return opened


def build_store(recipe: Recipe, folder: RunFolder, console: TextIO) -> CheckpointStore:
    """The run's checkpoint store, with an event for each save and a line where something is wrong. Collective."""
    keep_last, asynchronous = recipe.checkpoint.keep_last, recipe.checkpoint.asynchronous

    def say(line: str) -> None:
        write_line(console, line)

    uploads = None
    if recipe.checkpoint.remote is not None and dist.get_rank() == 0:
        uploads = Uploader(recipe.checkpoint.remote, folder, keep_last, say, folder.append_event)

    def carry(group: dist.ProcessGroup) -> Carrier:
        # Not below the run: what lies there may be copied on, as by SageMaker, which would take half a file for one.
        return Carrier(str(find_host_dir()), recipe.prepared_dir / ".carried", group)

    return CheckpointStore(
        folder.checkpoints_dir,
        keep_last,
        asynchronous,
        say,
        folder.append_event,
        uploads,
        None if shares_files() else carry,
    )


def build_snapshots(recipe: Recipe, console: TextIO) -> Snapshots:
    """The run's snapshots, where the recipe wants any. Collective."""
    every_steps = recipe.checkpoint.snapshot_every_steps
    return Snapshots(find_snapshot_dir(), every_steps, lambda line: write_line(console, line))


def write_line(console: TextIO, line: str) -> None:
    """A line for the person at the console. In one write: checkpoints are saved in a thread of their own."""
    console.write(f"{line}\n")
    console.flush()


def load_newest(
    store: CheckpointStore,
    snapshots: Snapshots,
    engine: Engine,
    sync: Synchronizer,
    judge: StepJudge,
    runtime: Runtime,
    console: TextIO,
) -> SavedState | None:
    """Fill engine, synchronizer and judge from the newest whole checkpoint or snapshot; what else is in it, or None.

    Collective.
    """
    snapshot = snapshots.newest()
    checkpoint = store.newest(beyond=-1 if snapshot is None else snapshot.step) or snapshot
    if checkpoint is None:
        return None
    saved = load_checkpoint(checkpoint, store, engine, sync, judge)
    if runtime.rank == 0:
        held = ", held in memory" if checkpoint == snapshot else ""
        write_line(console, f"Resuming from {checkpoint.path.name}{held}.")
    return saved


def build_loader(
    recipe: Recipe, plan: ParallelPlan, data: PreparedData, meshes: Meshes, start_step: int
) -> BatchLoader:
    """This rank's batches from a step on."""
    return BatchLoader(
        data.train,
        build_order(recipe, data.train),
        recipe.batches,
        plan.micro_batch_size,
        dp_rank=meshes.data_rank,
        dp_size=meshes.data_size,
        start_step=start_step,
        pin_memory=meshes.device_type == "cuda",
    )


def build_evaluator(
    recipe: Recipe,
    plan: ParallelPlan,
    data: PreparedData,
    objective: Objective,
    meshes: Meshes,
    device: torch.device,
) -> Evaluator | None:
    """The held-out text, where there is any: `evaluate.batches` global batches of each set, or the first 200."""
    if not data.validation:
        return None
    num_sequences = (recipe.evaluate.batches or DEFAULT_BATCHES) * recipe.global_batch_size
    return Evaluator(data.validation, objective, num_sequences, plan.micro_batch_size, meshes, device)


def build_sampler(
    recipe: Recipe, data: PreparedData, stops: Sequence[int], device: torch.device
) -> PromptSampler | None:
    """What continues `evaluate.prompts` at each evaluation, where there are any."""
    wanted = recipe.evaluate
    if not wanted.prompts:
        return None
    return PromptSampler(wanted.prompts, wanted.prompt_tokens, data.tokenizer, stops, recipe.run.seed, device)


def _any_microbatch(data: PreparedData, plan: ParallelPlan, device: torch.device) -> Microbatch:
    stop = data.train.num_samples
    return read_in_order(data.train, 0, plan.micro_batch_size, stop, trim=False).to(device)
