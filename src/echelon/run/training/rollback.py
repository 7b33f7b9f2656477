"""Handles bad steps: skips them, rolls back to a checkpoint, or ends the run with a diagnosis."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.ground.errors import TrainingError
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import broadcast_object
from echelon.recipe.operation import FaultConfig
from echelon.run.folder.run_folder import RunFolder
from echelon.run.training.bad_steps import Diagnosis
from echelon.run.training.metrics import StepMetrics, finite
from echelon.run.training.run_log import Accounting
from echelon.run.training.state import TrainState
from echelon.run.training.training_step import TrainingStep

if TYPE_CHECKING:
    from echelon.run.training.saver import Saver

logger = logging.getLogger(__name__)


class BadStep(Exception):
    """A bad step that needs a rollback or ends the run. Raised on every rank, between two steps."""

    def __init__(self, metrics: StepMetrics) -> None:
        super().__init__(f"step {metrics.step + 1}")
        self.metrics = metrics


@dataclass(frozen=True)
class BadStepHandler:
    """Handles bad steps according to the recipe's `fault`."""

    fault: FaultConfig
    train_step: TrainingStep
    saver: "Saver"
    accounting: Accounting

    def prepare(self, state: TrainState) -> None:
        """Before the first step of a run with rollbacks, save a checkpoint to return to. Collective."""
        if state.step == 0 and self.fault.on_bad_step == "rollback":
            self.saver.save(state)

    def pass_over(self, metrics: StepMetrics, state: TrainState) -> None:
        """Record a bad step, which was not applied.

        Raises BadStep on every rank if the recipe does not skip bad steps, or there were too many in a row.
        """
        if metrics.step + 1 in state.suppressed:
            return
        if self.fault.on_bad_step != "skip" or metrics.bad_in_a_row >= self.fault.max_bad_steps:
            raise BadStep(metrics)
        self._note(metrics, "skip", None)
        logger.warning(
            f"bad step {metrics.step + 1}: {describe_numbers(metrics)}; not applied, {metrics.bad_in_a_row} in a row "
            f"(fault.max_bad_steps={self.fault.max_bad_steps})"
        )

    def recover(self, metrics: StepMetrics, state: TrainState, is_own: bool = False) -> TrainState:
        """Return to the newest checkpoint and exclude this step, or end the run. Collective.

        The weights are still those that the step ran with: the judge has applied no step since. `is_own`: whether a
        loop of the user's ran the step, which cannot be run again here.

        Returns:
            The state to continue from.

        Raises:
            TrainingError: the recipe stops at bad steps, or there were too many in a row.
        """
        self.saver.store.wait()  # every rank is here, so the pending save can complete first
        goes_back = self.fault.on_bad_step == "rollback" and metrics.bad_in_a_row < self.fault.max_bad_steps
        diagnosis = None if is_own else self.train_step.diagnose(metrics.step)
        self._note(metrics, "rollback" if goes_back else "stop", diagnosis)
        if not goes_back:
            raise TrainingError(describe_stop(metrics, self.fault, diagnosis))
        number, checkpoint = metrics.step + 1, self.saver.store.newest()
        if checkpoint is None:
            raise TrainingError(
                f"step {number}: {describe_numbers(metrics)}, and there is no intact checkpoint to return to; run the "
                "same command again."
            )
        # Write the event first: a run that dies here must know that the step is excluded.
        self.accounting.event("rollback", step=checkpoint.step, suppressed=number)
        assert diagnosis is not None, "a recipe with train.loop has no rollback"
        logger.warning(
            f"bad step {number}: {describe_numbers(metrics)}; returning to step {checkpoint.step}, and step {number} "
            f"will not be applied. {diagnosis.describe()}"
        )
        saved = self.saver.load(checkpoint)
        self.accounting.go_back(checkpoint.step, {} if saved.goodput is None else saved.goodput.seconds)
        return saved.train.suppressing((*state.suppressed, number))

    def _note(self, metrics: StepMetrics, action: str, diagnosis: Diagnosis | None) -> None:
        self.accounting.event(
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
    """Describe the loss and the gradient norm of a step."""
    return f"loss={metrics.loss:.6g} and gradient norm={metrics.grad_norm:.6g}"


def describe_stop(metrics: StepMetrics, fault: FaultConfig, diagnosis: Diagnosis | None) -> str:
    """Return the message for a run that ends at a bad step: the reason, the diagnosis and the fix."""
    if finite(metrics.grad_norm) is None:
        rule = "and both must be finite"
    elif fault.spike_factor is None:
        rule = "and the synchronizer (sync.name) rejected the update"
    else:
        rule = f"which is more than fault.spike_factor={fault.spike_factor:g} times the median of the preceding steps"
    many = ""
    if fault.on_bad_step != "stop":
        many = f"; it is the last of {metrics.bad_in_a_row} bad steps in a row (fault.max_bad_steps)"
    details = "" if diagnosis is None else f"{diagnosis.describe()} "
    return (
        f"step {metrics.step + 1}: {describe_numbers(metrics)}, {rule}{many}; the update was not applied, and earlier "
        f"checkpoints are kept. {details}Lower optim.learning_rate, raise optim.warmup or set "
        "optim.max_grad_norm, and start again with --fresh or another run.name"
        + ("; or skip such steps with fault.on_bad_step=skip." if fault.on_bad_step == "stop" else ".")
    )


def find_suppressed(folder: RunFolder, meshes: Meshes) -> tuple[int, ...]:
    """Return the steps that rollbacks have excluded, from events.jsonl, also those not in any checkpoint yet.

    Collective: rank 0 reads the file.
    """
    return tuple(broadcast_object(read_suppressed(folder) if meshes.is_first else [], meshes.everyone))


def read_suppressed(folder: RunFolder) -> list[int]:
    """Return the steps that rollbacks have excluded, from events.jsonl. On one rank."""
    return [event["suppressed"] for event in folder.rows.read_events() if event["event"] == "rollback"]
