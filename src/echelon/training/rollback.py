"""What is done about a bad step: it is passed over, or leads back to a checkpoint, or ends the run with a diagnosis."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from echelon.checkpoint.folder import Checkpoint
from echelon.checkpoint.store import CheckpointStore
from echelon.engines.engine import Engine
from echelon.errors import TrainingError
from echelon.recipe import FaultConfig
from echelon.runs.run_folder import RunFolder
from echelon.sync import Synchronizer
from echelon.training.bad_steps import StepJudge
from echelon.training.diagnosis import Diagnosis, diagnose
from echelon.training.metrics import StepMetrics, finite
from echelon.training.state import SavedState

if TYPE_CHECKING:
    from echelon.training.trainer import Trainer


class BadStep(Exception):
    """A step with which training cannot simply go on. Raised on every rank, between two steps."""

    def __init__(self, metrics: StepMetrics) -> None:
        super().__init__(f"step {metrics.step + 1}")
        self.metrics = metrics


def load_checkpoint(
    checkpoint: Checkpoint, store: CheckpointStore, engine: Engine, sync: Synchronizer, judge: StepJudge
) -> SavedState:
    """Put engine, synchronizer and judge where a checkpoint has them; everything in it that is no tensor. Collective.

    Raises:
        CheckpointError: it is hostile, or of something else than this run; nothing is changed then.
    """
    saved = SavedState.from_dict(checkpoint.read_state())
    sync.load_state_dict(saved.sync)
    fill = partial(store.load, checkpoint)
    engine.load(lambda tensors: sync.load(tensors, fill))
    judge.load_state_dict(asdict(saved.judge))
    return saved


def pass_over(trainer: "Trainer", metrics: StepMetrics) -> None:
    """Note a bad step; it was not applied, and nothing else is to be done unless there were too many in a row.

    Raises BadStep where there is.
    """
    if metrics.step + 1 in trainer.state.suppressed:
        return
    fault = trainer.recipe.fault
    if fault.on_bad_step != "skip" or metrics.bad_in_a_row >= fault.max_bad_steps:
        raise BadStep(metrics)
    _note(trainer, metrics, "skip", None)
    if trainer.journal is not None:
        trainer.journal.say(
            f"bad step {metrics.step + 1}: {describe_numbers(metrics)}; not applied, {metrics.bad_in_a_row} in a row "
            f"of fault.max_bad_steps={fault.max_bad_steps}"
        )


def recover(trainer: "Trainer", metrics: StepMetrics) -> None:
    """Go back to the newest checkpoint, never to apply this step; or end the run. Collective.

    The weights are those that the step met: the judge has applied nothing since.

    Raises:
        TrainingError: the recipe wants the run to stop, or it had too many bad steps in a row.
    """
    trainer.store.wait()  # every rank is here, so the save under way can be whole first
    fault = trainer.recipe.fault
    goes_back = fault.on_bad_step == "rollback" and metrics.bad_in_a_row < fault.max_bad_steps
    batch = trainer.loader.batch(metrics.step).to(trainer.device)
    num_targets = trainer.count_targets(batch).shared.clamp(min=1)
    diagnosis = diagnose(trainer.engine, batch, num_targets, trainer.meshes.everyone)
    _note(trainer, metrics, "rollback" if goes_back else "stop", diagnosis)
    if not goes_back:
        raise TrainingError(describe_stop(metrics, fault, diagnosis))
    _roll_back(trainer, metrics, diagnosis)


def _roll_back(trainer: "Trainer", metrics: StepMetrics, diagnosis: Diagnosis) -> None:
    """Collective. What it writes first is the event: a run that dies here must know that the step is ruled out."""
    journal, number = trainer.journal, metrics.step + 1
    checkpoint = trainer.store.newest()
    if checkpoint is None:
        raise TrainingError(
            f"step {number}: {describe_numbers(metrics)}, and there is no checkpoint to go back to any more; start the "
            "same command again."
        )
    if journal is not None:
        journal.event("rollback", step=checkpoint.step, suppressed=number)
        journal.say(
            f"bad step {number}: {describe_numbers(metrics)}; back to step {checkpoint.step}, and step {number} will "
            f"not be applied. {diagnosis.describe()}"
        )
    known = trainer.state.suppressed
    saved = load_checkpoint(checkpoint, trainer.store, trainer.engine, trainer.sync, trainer.judge)
    trainer.state = saved.train.suppressing((*known, number))
    trainer.goodput.go_back({} if saved.goodput is None else saved.goodput.seconds)
    trainer.loader.seek(checkpoint.step)
    if journal is not None:
        journal.cut(checkpoint.step)


def _note(trainer: "Trainer", metrics: StepMetrics, action: str, diagnosis: Diagnosis | None) -> None:
    if trainer.journal is not None:
        trainer.journal.event(
            "bad_step",
            step=metrics.step + 1,
            loss=finite(metrics.loss),
            grad_norm=finite(metrics.grad_norm),
            batch_hash=metrics.batch_hash,
            in_a_row=metrics.bad_in_a_row,
            action=action,
            **({} if diagnosis is None else diagnosis.fields()),
        )


def describe_numbers(metrics: StepMetrics) -> str:
    """The loss and the norm of a step."""
    return f"loss={metrics.loss:.6g} and gradient norm={metrics.grad_norm:.6g}"


def describe_stop(metrics: StepMetrics, fault: FaultConfig, diagnosis: Diagnosis) -> str:
    """Why the run ends at this step, what is known of it, and what to do."""
    is_finite = finite(metrics.grad_norm) is not None
    rule = (
        f"which is more than fault.spike_factor={fault.spike_factor:g} times the median of the steps before"
        if is_finite
        else "and both must be finite"
    )
    many = ""
    if fault.on_bad_step != "stop":
        many = f"; it is the last of {metrics.bad_in_a_row} bad steps in a row (fault.max_bad_steps)"
    return (
        f"step {metrics.step + 1}: {describe_numbers(metrics)}, {rule}{many}; the update was not applied, and the "
        f"checkpoints before it are kept. {diagnosis.describe()} Lower optim.learning_rate, lengthen "
        "optim.warmup_steps or set optim.max_grad_norm, and train anew with --fresh or another run.name"
        + ("; or pass over such steps with fault.on_bad_step=skip." if fault.on_bad_step == "stop" else ".")
    )


def find_suppressed(folder: RunFolder) -> tuple[int, ...]:
    """The steps that rollbacks of this run have ruled out, by events.jsonl: also those no checkpoint was saved after.

    Collective: rank 0 reads.
    """
    found = [_read_suppressed(folder) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found, src=0)
    return tuple(found[0])


def _read_suppressed(folder: RunFolder) -> list[int]:
    return [event["suppressed"] for event in folder.read_events() if event["event"] == "rollback"]
