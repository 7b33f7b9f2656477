"""The run, as a training loop of your own sees it: `def loop(learner, run)`, named by `train.loop`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.ground.errors import TrainingError
from echelon.learn.data.loader import StepBatch
from echelon.run.training.trainer import Trainer

if TYPE_CHECKING:
    from echelon.learn.answers.judging import AnswerJudge
    from echelon.learn.learner import CountedSums, Learner

_EVALUATIONS, _SAVES = ("evaluation",), ("checkpoint", "snapshot")


class LoopRun:
    """What echelon does around the steps of a loop: batches, the schedule, metrics, evaluations, saves and stops.

    Every rank runs the loop and calls the collective methods in the same order. Steps are counted from 0 here, and from
    1 in rows and names of checkpoints.
    """

    def __init__(self, trainer: Trainer, judge: "AnswerJudge | None" = None) -> None:
        self._trainer = trainer
        self.judge = judge
        """Gives the prompts of the recipe, and judges answers by its rewards; None for a recipe without any."""
        self._wait_seconds = 0.0

    @property
    def num_steps(self) -> int:
        """The number of steps of the run."""
        return self._trainer.num_steps

    def steps(self) -> Iterator[int]:
        """Yield the index of every step, from 0, or from the checkpoint that the run resumes from. Collective.

        Each step must be recorded. When it ends, everything is done that the recipe wants after this step and the loop
        has not done itself. The steps end after the last one, or early (`evaluate.early_stopping`).

        Raises:
            StoppedError: a rank received a stop request, or a budget is reached; all ranks have saved.
            TrainingError: a step was not recorded, or was bad and the recipe stops there.
        """
        return self._trainer.steps()

    def batch(self, step: int) -> StepBatch:
        """Return this rank's batch of a step, from the recipe's data or `data.source`."""
        feed = self._trainer.train_step.loader
        batch = feed.batch(step)
        self._wait_seconds += feed.wait_seconds
        return batch

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step by the recipe's schedule."""
        return self._trainer.train_step.schedule(step)

    def record(
        self,
        step: int,
        sums: "CountedSums",
        grad_norm: Tensor,
        *,
        learning_rate: float | None = None,
        **further: float | Tensor,
    ) -> None:
        """Write the step's row of metrics.jsonl, once per step. Collective.

        The row is written one step later, when its values have reached the host, so that the device never waits.

        Args:
            sums: what `learner.forward_backward` returned.
            grad_norm: what `learner.clip` returned. A step whose norm is not finite is bad: see `fault.on_bad_step`.
            learning_rate: the one that was used; None: that of the recipe's schedule.
            further: metrics of your own, numbers or scalar tensors, with the same names on every rank. The row has the
                mean over all ranks, under the same name.

        Raises:
            TrainingError: not the step that `steps` has yielded, or it was recorded already.
        """
        self._trainer.expect(step, is_recorded=False)
        device = self._trainer.train_step.learner.device
        values: Mapping[str, Tensor] = {name: torch.as_tensor(value).detach() for name, value in further.items()}
        for name, value in values.items():
            if value.numel() != 1:
                raise TrainingError(
                    f"run.record(..., {name}=...): a metric is one number, and this has the shape {list(value.shape)}; "
                    "give its mean."
                )
        rate = self.learning_rate(step) if learning_rate is None else learning_rate
        moved = {name: value.to(device, non_blocking=True) for name, value in values.items()}
        self._trainer.record(step, sums, grad_norm, rate, self._wait_seconds, moved)
        self._wait_seconds = 0.0

    def beat(self, activity: str) -> None:
        """Report progress within a step, and the activity that begins. A verdict about a hang names it."""
        self._trainer.accounting.heartbeat.beat(activity)

    def event(self, name: str, **fields: Any) -> None:
        """Append a line to events.jsonl, from rank 0 alone. Raises OSError if that fails."""
        self._trainer.accounting.event(name, **fields)

    def keep_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to samples.jsonl, from rank 0 alone: a `prompt`, a `text`, and further fields of your own."""
        if (journal := self._trainer.accounting.journal) is not None:
            journal.keep_samples(step + 1, rows)

    @property
    def kept(self) -> Mapping[str, Any]:
        """What the function given to `keep` returned for the checkpoint that the run goes on from; empty at a start."""
        return self._trainer.saver.contents.loop.loaded

    def keep(self, describe: Callable[[], dict[str, Any]]) -> None:
        """Save what this function returns, JSON values, with every checkpoint: what the loop has between two steps.

        Args:
            describe: called on every rank, which must return the same. It may be collective.
        """
        self._trainer.saver.contents.loop.describe = describe

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate the recipe's objective on held-out text if that is due after this step. Collective."""
        self._trainer.expect(step, is_recorded=True)
        self._trainer.do_due(step, _EVALUATIONS)

    def save_if_due(self, step: int) -> None:
        """Save if a checkpoint or snapshot is due after this step. Collective. Raises CheckpointError."""
        self._trainer.expect(step, is_recorded=True)
        self._trainer.do_due(step, _SAVES)


def run_loop(loop: "Callable[[Learner, LoopRun], None]", judge: "AnswerJudge | None", trainer: Trainer) -> None:
    """Run a loop of the user's own with what the trainer has. Collective."""
    loop(trainer.train_step.learner, LoopRun(trainer, judge))
