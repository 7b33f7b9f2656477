"""Work between two steps: comparing ranks, evaluating, saving, and stopping on request."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from echelon.ground.stop_request import StopRequest
from echelon.run.training.evaluations import Evaluations
from echelon.run.training.run_log import Accounting
from echelon.run.training.state import TrainState

if TYPE_CHECKING:
    from echelon.learn.learner import Learner
    from echelon.run.training.saver import Saver


@dataclass(frozen=True)
class Due:
    """The work that is due after a step; usually none."""

    comparison: bool = False
    evaluation: bool = False
    checkpoint: bool = False
    snapshot: bool = False

    def __bool__(self) -> bool:
        return self.comparison or self.evaluation or self.checkpoint or self.snapshot


WORKS = tuple(work.name for work in fields(Due))
"""The names of all works that may be due."""


@dataclass
class Pauses:
    """Decides what is due after each step, and does it. Every rank must call its methods in the same order."""

    learner: "Learner"
    saver: "Saver"
    evaluations: Evaluations | None
    """None for a run without held-out text."""
    accounting: Accounting
    stop: StopRequest

    def agree_on_due(self, done: int, num_steps: int) -> Due:
        """Return what is due after this step, the same on every rank. Must be called once after each step.

        Collective after some steps. `num_steps`: the last step.
        """
        is_last = done == num_steps
        return Due(
            comparison=any(monitor.needs_pause(done) for monitor in self.accounting.monitors),
            evaluation=self.evaluations is not None and (is_last or self.evaluations.is_due(done)),
            checkpoint=is_last or self.saver.agree_on_save(done),
            snapshot=self.saver.snapshots is not None and self.saver.snapshots.is_due(done),
        )

    def stops_early(self, state: TrainState) -> bool:
        """Whether the loss has not improved for `evaluate.early_stopping` evaluations."""
        patience = self.learner.recipe.evaluate.early_stopping
        return patience is not None and state.evaluations_since_best >= patience

    def run(self, state: TrainState, due: Due) -> TrainState:
        """Do what is due, handle a stop request, and return the new state. Collective.

        The time does not count for any step.

        Raises:
            StoppedError: the ranks have agreed to stop, and the run is saved.
            TrainingError: replicas have different weights, or ranks compute different results.
            CheckpointError: see Saver.
        """
        is_best = False
        for monitor in self.accounting.monitors:
            monitor.on_pause(state.step)
        if self.evaluations is not None and due.evaluation:
            state = self.evaluations.run(state)
            is_best = not state.owes_evaluation and state.best_step == state.step
        if self.stop.agreed is not None:
            self.saver.save_and_leave(state, self.stop.agreed)
        is_saved = due.checkpoint or self.stops_early(state) or (is_best and self.saver.keeps_best)
        if is_saved:
            self.saver.save_and_learn(state)
        if self.saver.snapshots is not None and due.snapshot:  # also after a checkpoint: it is read without the disk
            self.saver.save_snapshot(state, self.saver.snapshots)
        self.accounting.meter.restart()
        return state
