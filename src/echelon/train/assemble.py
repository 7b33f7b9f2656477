"""Building a trainer from a recipe and a plan, in one rank, and running it."""

from typing import TextIO

import torch
import torch.distributed as dist

from echelon.checkpoint.store import CheckpointStore
from echelon.checkpoint.upload import Uploader
from echelon.data.loader import BatchLoader, Microbatch
from echelon.data.mixture import build_order
from echelon.data.prepare import PreparedData, open_prepared
from echelon.engines.native import NativeEngine, build_native_engine
from echelon.errors import StoppedError
from echelon.mesh import Meshes, build_mesh
from echelon.model.build import resolve_config
from echelon.model.folder import write_model_folder
from echelon.objective import CausalLM
from echelon.plan import ParallelPlan
from echelon.recipe import Recipe
from echelon.run_folder import RunFolder
from echelon.runtime import Runtime, describe_peak, find_peak_flops
from echelon.schedule import build_schedule
from echelon.shape import build_shape
from echelon.stopping import StopRequest
from echelon.sync import EveryStep
from echelon.train.evaluate import DEFAULT_BATCHES, Evaluator, read_in_order
from echelon.train.journal import Journal
from echelon.train.sampler import PromptSampler
from echelon.train.state import TrainState
from echelon.train.trackers import start_trackers
from echelon.train.trainer import Trainer

# Of the notice: what closing trackers and ending the processes may take after the last upload was given up.
_LEAVING_SECONDS = 5.0


def run_training(
    recipe: Recipe, plan: ParallelPlan, folder: RunFolder, runtime: Runtime, console: TextIO, stop: StopRequest
) -> TrainState:
    """Train in this rank until the run's last step, from the newest checkpoint if there is one. Collective.

    Raises StoppedError when a rank's `stop` was asked for.
    """
    trainer = build_trainer(recipe, plan, folder, runtime, console)
    trainer.stop = stop

    def time_left() -> float:
        return stop.seconds_left(recipe.fault.notice_seconds) - _LEAVING_SECONDS

    done = False
    try:
        state = trainer.fit()
        trainer.store.close(time_left)
        if trainer.journal is not None:
            trainer.journal.flush()
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
        trainer.loader.close()
        if trainer.journal is not None:
            trainer.journal.close(done)
    return state


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
    device = runtime.device
    meshes = build_mesh(plan, device.type)
    data = open_prepared(folder.read_prepared_path(), recipe.data.sequence_len)
    config = resolve_config(recipe, data.vocab_size, data.tokenizer)
    if runtime.rank == 0:
        write_model_folder(folder.model_dir, config, data.tokenizer)
    objective = CausalLM()
    engine = build_native_engine(recipe, config, plan, meshes, objective, device, compile_backend)
    engine.rehearse(_any_microbatch(data, plan, device))
    store = build_store(recipe, folder, console)
    store.rehearse(engine.state_dict())
    state = load_newest(store, engine, runtime, console)
    state = state.judged_by(recipe.evaluate.select_by)
    sampler = build_sampler(recipe, data, device)
    journal = None
    num_steps = recipe.num_steps(data.train.num_samples)
    peak_flops = find_peak_flops(device, plan.precision.compute)
    if runtime.rank == 0:
        folder.cut_metrics(state.step, state.owes_evaluation)
        store.upload_newest(state.step, state.best_step if recipe.checkpoint.keep_best else None)
        folder.append_event("resume" if state.step else "start", step=state.step, peak_flops=peak_flops)
        journal = Journal(folder, console, num_steps, recipe.train.log_every, recipe.batches)
        journal.add_couriers(start_trackers(recipe, folder, state.step, journal.say))
        journal.say(f"tokens: pad {config.pad_token_id}, eos {config.eos_token_id}, bos {config.bos_token_id}")
        journal.say(f"mfu: against {peak_flops / 1e12:.3g} TFLOP/s a process, {describe_peak(device)}")
        if sampler is not None:
            journal.say(sampler.describe())
    return Trainer(
        recipe=recipe,
        num_steps=num_steps,
        engine=engine,
        objective=objective,
        sync=EveryStep(),
        schedule=build_schedule(recipe.optim, num_steps, recipe.batches),
        loader=build_loader(recipe, plan, data, meshes, state.step),
        evaluator=build_evaluator(recipe, plan, data, meshes, device),
        sampler=sampler,
        store=store,
        meshes=meshes,
        device=device,
        shape=build_shape(config.to_dict()),
        peak_flops=peak_flops,
        journal=journal,
        state=state,
    )


def build_store(recipe: Recipe, folder: RunFolder, console: TextIO) -> CheckpointStore:
    """The run's checkpoint store, with an event for each save and a line where something is wrong. Collective."""
    keep_last, asynchronous = recipe.checkpoint.keep_last, recipe.checkpoint.asynchronous

    def say(line: str) -> None:
        write_line(console, line)

    uploads = None
    if recipe.checkpoint.remote is not None and dist.get_rank() == 0:
        uploads = Uploader(recipe.checkpoint.remote, folder, keep_last, say, folder.append_event)
    return CheckpointStore(folder.checkpoints_dir, keep_last, asynchronous, say, folder.append_event, uploads)


def write_line(console: TextIO, line: str) -> None:
    """A line for the person at the console. In one write: checkpoints are saved in a thread of their own."""
    console.write(f"{line}\n")
    console.flush()


def load_newest(store: CheckpointStore, engine: NativeEngine, runtime: Runtime, console: TextIO) -> TrainState:
    """Fill the engine from the newest whole checkpoint; the state of a fresh run where there is none. Collective."""
    checkpoint = store.newest()
    if checkpoint is None:
        return TrainState()
    store.load(checkpoint, engine.state_dict())
    if runtime.rank == 0:
        write_line(console, f"Resuming from {checkpoint.path.name}.")
    return TrainState.from_dict(checkpoint.read_state()["train"])


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
        pin_memory=meshes.world.device_type == "cuda",
    )


def build_evaluator(
    recipe: Recipe, plan: ParallelPlan, data: PreparedData, meshes: Meshes, device: torch.device
) -> Evaluator | None:
    """The held-out text, where there is any: `evaluate.batches` global batches of each set, or the first 200."""
    if not data.validation:
        return None
    num_sequences = (recipe.evaluate.batches or DEFAULT_BATCHES) * recipe.global_batch_size
    return Evaluator(data.validation, num_sequences, plan.micro_batch_size, meshes, device)


def build_sampler(recipe: Recipe, data: PreparedData, device: torch.device) -> PromptSampler | None:
    """What continues `evaluate.prompts` at each evaluation, where there are any."""
    wanted = recipe.evaluate
    if not wanted.prompts:
        return None
    return PromptSampler(wanted.prompts, wanted.prompt_tokens, data.tokenizer, recipe.run.seed, device)


def _any_microbatch(data: PreparedData, plan: ParallelPlan, device: torch.device) -> Microbatch:
    return read_in_order(data.train, 0, plan.micro_batch_size, data.train.num_samples).to(device)
