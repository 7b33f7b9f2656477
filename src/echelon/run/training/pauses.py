"""Work between two steps: comparing ranks, evaluating, saving, and stopping on request."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, NoReturn

from echelon.ground.errors import TrainingError
from echelon.ground.stop_request import StopRequest
from echelon.run.training.evaluations import Evaluations
from echelon.run.training.pass_comparison import OddPass, compare_passes, describe_passes
from echelon.run.training.replicas import ReplicaDifference, compare_replicas, describe_differences
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


WORKS = tuple(field.name for field in fields(Due))
"""The names of all works that may be due."""


@dataclass
class Pauses:
    """Decides what is due after each step, and does it. Every rank must call its methods in the same order.

    Attributes:
        evaluations: None for a run without held-out text.
    """

    learner: "Learner"
    saver: "Saver"
    evaluations: Evaluations | None
    accounting: Accounting
    stop: StopRequest

    @property
    def compare_every(self) -> int | None:
        """The interval in steps at which replicas are compared, also before each save; None for never."""
        return self.learner.recipe.fault.verify_replicas_every

    @property
    def compare_passes_every(self) -> int | None:
        """The interval in steps at which ranks compute the same tokens, also before each save; None for never."""
        return self.learner.recipe.fault.verify_passes_every

    @property
    def patience(self) -> int | None:
        """The number of consecutive evaluations without a lower loss that end the run; None for no limit."""
        return self.learner.recipe.evaluate.early_stopping

    def agree_on_due(self, done: int, is_last: bool) -> Due:
        """Return what is due after this step, the same on every rank. Must be called once after each step.

        Collective after some steps. `is_last`: whether it is the run's last step.
        """
        return Due(
            comparison=any(
                every is not None and done % every == 0 for every in (self.compare_every, self.compare_passes_every)
            ),
            evaluation=self.evaluations is not None and (is_last or self.evaluations.is_due(done)),
            checkpoint=is_last or self.saver.agree_on_save(done),
            snapshot=self.saver.snapshot_due(done),
        )

    def stops_early(self, state: TrainState) -> bool:
        """Whether the loss has not improved for `evaluate.early_stopping` evaluations."""
        return self.patience is not None and state.evaluations_since_best >= self.patience

    def run(self, state: TrainState, due: Due) -> TrainState:
        """Do what is due, handle a stop request, and return the new state. Collective.

        The time does not count for any step.

        Raises:
            StoppedError: the ranks have agreed to stop, and the run is saved.
            TrainingError: replicas have different weights, or ranks compute different results.
            CheckpointError: see Saver.
        """
        is_best = False
        if self.compare_every is not None:  # also before a save, which stores the weights of one replica
            self._compare_replicas(state.step)
        if self.compare_passes_every is not None:
            self._compare_passes(state.step)
        if self.evaluations is not None and due.evaluation:
            state = self.evaluations.run(state)
            is_best = not state.owes_evaluation and state.best_step == state.step
        if self.stop.agreed is not None:
            self.saver.save_and_leave(state, self.stop.agreed)
        is_saved = due.checkpoint or self.stops_early(state) or (is_best and self.saver.keeps_best)
        if is_saved:
            self.saver.save_and_learn(state)
        if due.snapshot and (self.saver.snapshots.is_beside or not is_saved):
            self.saver.save_snapshot(state)
        self.accounting.restart_clock()
        return state

    def _compare_replicas(self, step: int) -> None:
        """Raise TrainingError if replicas have different weights. Collective."""
        if differences := compare_replicas(self.learner.engine.state_dict(), self.learner.meshes):
            self._give_up("replicas_differ", step, differences, describe_differences(differences, step))

    def _compare_passes(self, step: int) -> None:
        """Raise TrainingError if ranks compute different results from the same tokens. Collective."""
        if found := compare_passes(self.learner, step):
            self._give_up("passes_differ", step, found, describe_passes(found, step))

    def _give_up(self, event: str, step: int, found: Sequence[ReplicaDifference | OddPass], message: str) -> NoReturn:
        """Write an event for each difference, and raise TrainingError. Collective."""
        self.saver.wait()  # the pending save was compared before it began
        for difference in found:
            self.accounting.event(event, step=step, **asdict(difference))
        raise TrainingError(message)
