"""Open a run's journal and goodput at the beginning of a start, and describe the training."""

import logging
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from echelon.ground.errors import EchelonError
from echelon.ground.launch_environment import find_start
from echelon.ground.sizes import render_duration
from echelon.ground.variables import read_environment
from echelon.learn.data.prepared import PreparedData, describe_held_out
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.distributed.traffic import count_traffic
from echelon.learn.learner import Learner
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from echelon.recipe.synchronization import PARAMETER_SERVER
from echelon.run.folder.cost import find_price_here
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.budget import CostMeter
from echelon.run.journal.goodput import GoodputTracker
from echelon.run.journal.journal import Journal
from echelon.run.journal.network import NetworkWatch
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.journal.trackers import start_trackers
from echelon.run.training.replicas import describe_compared, describe_replicas
from echelon.run.training.state import GoodputState, SavedState, TrainState
from echelon.run.training.trainer import Trainer

if TYPE_CHECKING:
    from echelon.run.lifecycle.view_group import ViewMembership

logger = logging.getLogger(__name__)

# The events that end a run.
_ENDS = ("done", "early_stop")


def open_journal(
    learner: Learner, folder: RunFolder, runtime: Runtime, step: int, recovery: RecoveryWatch | None
) -> Journal:
    """The run's journal, with its cost meter and its trackers. On rank 0, after the event of this start.

    `step` is the number of completed steps.
    """
    recipe = learner.recipe
    num_steps = recipe.num_steps(learner.data.train.num_samples)
    shows_mfu = learner.device.type != "cpu" or logger.isEnabledFor(logging.DEBUG)
    journal = Journal(folder, num_steps, recipe.train.log_every, recipe.batches, shows_mfu)
    journal.recovery = recovery
    num_machines = -(-runtime.world_size // runtime.local_world_size)
    journal.meter = CostMeter(recipe, folder, find_price_here(recipe, read_environment()), num_machines)
    journal.network = NetworkWatch(count_traffic())
    journal.forwarders += start_trackers(recipe, folder, step)
    return journal


def record_beginning(folder: RunFolder, step: int, data: PreparedData, peak_flops: float) -> None:
    """Write the event of a start or a resume. On rank 0."""
    text = {"prepared": str(data.path), "digest": data.content_digest, "packing": data.is_packed}
    text |= describe_held_out(data)
    machine = {"host": platform.node(), "pids": dict(sorted(folder.read_pids().items()))}
    folder.rows.append_event("resume" if step else "start", step=step, peak_flops=peak_flops, **machine, **text)


def record_changes(folder: RunFolder, membership: "ViewMembership", step: int, sync: str) -> None:
    """Log the replicas that were lost and have joined, and write their events. On rank 0, before the next step.

    `step`: the number of complete steps. `sync`: the name of the synchronizer.
    """
    word = "worker" if sync == PARAMETER_SERVER else "replica"
    now, size = time.time(), membership.size
    for change in membership.board.find_changes(membership.number):
        seconds = now - change.time
        fields = {"replica": change.replica, "pid": change.pid, "replicas": size, "seconds": seconds}
        with suppress(OSError):  # the disk may be full
            if change.reason is None:
                folder.rows.append_event("replica_joined", step=step, **fields)
            else:
                folder.rows.append_event("replica_lost", step=step, reason=change.reason, **fields)
        if change.reason is None:
            training = f"{size} {word}{'' if size == 1 else 's'}"
            logger.info(f"{sync}: {word} {change.replica} has joined after step {step}; {training} now")
        else:
            going_on = f"1 {word} goes on" if size == 1 else f"{size} {word}s go on"
            logger.warning(
                f"{sync}: {word} {change.replica} (pid {change.pid}) {change.reason}; {going_on} after step {step}, "
                f"{seconds:.1f} s later"
            )
    membership.board.tell_recorded(membership.number)


def describe_training(
    recipe: Recipe, plan: ParallelPlan, config: PretrainedConfig, data: PreparedData, stops: Sequence[int]
) -> Iterator[str]:
    """Lines about the training: special tokens, and the replicas that are compared."""
    yield describe_tokens(config, data.tokenizer, stops)
    if recipe.fault.verify_replicas_every is not None:
        yield describe_replicas(plan)
    if recipe.fault.verify_passes_every is not None:
        yield describe_compared(plan)


def describe_tokens(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> str:
    """A line about the special tokens of a training, and those at which generation stops."""
    special = ", ".join(_describe_token(kind, config, tokenizer) for kind in ("pad", "eos", "bos"))
    ends = [f"{stop} ({tokenizer.convert_ids_to_tokens(stop)})" for stop in stops]
    return f"tokens: {special}; generation stops at {', '.join(ends) or 'none'}"


def _describe_token(kind: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """A special token's id, and whose it is. Padding takes the tokenizer's; the others are first those of the model."""
    ids = {"model config": getattr(config, f"{kind}_token_id", None)}
    ids["tokenizer"] = getattr(tokenizer, f"{kind}_token_id")
    order = ("tokenizer", "model config") if kind == "pad" else ("model config", "tokenizer")
    return next((f"{kind} {ids[name]} ({name})" for name in order if ids[name] is not None), f"{kind} none")


def describe_end(
    folder: RunFolder, state: TrainState, seconds: float, cost: str | None, recipe: Recipe
) -> Iterator[str]:
    """Lines about a run that is done: what came out, and the commands that use it, where its files stay.

    `seconds`: the wall time of all starts. `cost`: of all starts, None if no price is known.
    """
    draws_answers = recipe.draws_answers
    last = folder.rows.last_loss()
    parts = [f"done: {state.step:,} steps in {render_duration(seconds)}"]
    if last is not None and not draws_answers:
        parts.append(f"last training loss {last:.4f}")
    if state.best_loss is not None and recipe.compared_task is not None:
        parts.append(f"best {recipe.compared_task} at step {state.best_step:,}")
    elif state.best_loss is not None:
        name, best = ("reward", 0.0 - state.best_loss) if draws_answers else ("loss", state.best_loss)
        parts.append(f"best held-out {name} {best:.4f} at step {state.best_step:,}")
    if cost is not None:
        parts.append(f"cost {cost}")
    yield "; ".join(parts)
    # Here: no start waits for what only an end needs.
    from echelon.run.report.judgement import judge_run
    from echelon.run.report.run_record import read_record

    with suppress(OSError, ValueError, EchelonError):  # a damaged file
        yield from (f"verdict: {sentence}" for sentence in judge_run(read_record(folder.path, with_traces=False)))
    yield f"run folder: {folder.path}"
    if "SM_HOSTS" in read_environment():  # a container of SageMaker, whose paths end with the run
        return
    run = shlex.quote(str(folder.path))
    if not draws_answers:
        yield f"next: echelon eval {run}"
    if not recipe.objective.scores_texts:
        yield f'next: echelon generate {run} --prompt "..."'
    yield f"next: echelon export {run} {shlex.quote(f'{folder.path.name}-exported')}"


def open_goodput(folder: RunFolder, saved: SavedState | None, lost_at: float | None = None) -> GoodputTracker:
    """The run's goodput so far; also removes the metrics rows of lost steps. On rank 0.

    `lost_at`: when a rank was lost, where the others have kept their processes; None at a start of all.
    """
    written = folder.metrics_path.stat().st_mtime if folder.metrics_path.exists() else 0.0
    at = TrainState() if saved is None else saved.train
    num_cut = folder.rows.cut_metrics(at.step, at.owes_evaluation)
    goodput = None if saved is None else saved.goodput
    events = [event for event in folder.rows.read_events() if event["event"] in ("start", "resume", *_ENDS)]
    starts = [event["time"] for event in events if event["event"] == "start"]
    if goodput is None and starts:  # an earlier start saved no checkpoint
        goodput = GoodputState({}, min(starts), stopped=False)
    if goodput is None:
        return GoodputTracker(find_start(0.0))
    if events and events[-1]["event"] in _ENDS:  # the run had finished, and was given more steps later
        goodput = replace(goodput, stopped=True)
    opened = GoodputTracker(find_start(goodput.until) if lost_at is None else lost_at)
    opened.resume(goodput, last_sign=written if num_cut else 0.0)
    return opened


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
    task = trainer.train_step.learner.recipe.compared_task
    sought, prefix = ("lower loss", "the lowest was") if task is None else (f"better {task}", "the best was")
    value = "" if state.best_loss is None or task is not None else f" {state.best_loss:.4f}"
    best = "none was finite" if state.best_loss is None else f"{prefix}{value} at step {state.best_step}"
    logger.info(
        f"early stopping at step {state.step}: no {sought} in {state.evaluations_since_best} evaluations; {best}"
    )
