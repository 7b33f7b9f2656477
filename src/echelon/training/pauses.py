"""What is done between two steps: replicas compared, the run evaluated, saved, and left when it is to stop."""

from dataclasses import asdict, dataclass

from echelon.distributed.mesh import Meshes
from echelon.engines import Engine
from echelon.errors import TrainingError
from echelon.stopping import StopRequest
from echelon.training.accounting import Accounting
from echelon.training.evaluations import Evaluations
from echelon.training.replicas import compare_replicas, describe_differences
from echelon.training.saving import Saver
from echelon.training.state import TrainState


@dataclass(frozen=True)
class Due:
    """What is to be done after a step: nothing, after most."""

    comparison: bool = False
    evaluation: bool = False
    checkpoint: bool = False
    snapshot: bool = False

    def __bool__(self) -> bool:
        return self.comparison or self.evaluation or self.checkpoint or self.snapshot


@dataclass
class Pauses:
    """Decides after each step what is due, and does it. Every rank calls its methods in the same order.

    Attributes:
        evaluations: None for a run that holds no text out.
        compare_every: every how many steps replicas are compared, and before each save; None: never.
        patience: how many evaluations in a row without a lower loss end the run; None: never.
    """

    engine: Engine
    saver: Saver
    evaluations: Evaluations | None
    accounting: Accounting
    meshes: Meshes
    stop: StopRequest
    compare_every: int | None
    patience: int | None

    def agree_on_due(self, done: int, is_last: bool) -> Due:
        """What is due after this step, the same on every rank; to be called once after each. Collective at times.

        `is_last`: it is the run's last step.
        """
        return Due(
            comparison=self.compare_every is not None and done % self.compare_every == 0,
            evaluation=self.evaluations is not None and (is_last or self.evaluations.is_due(done)),
            checkpoint=is_last or self.saver.agree_on_save(done),
            snapshot=self.saver.snapshot_due(done),
        )

    def stops_early(self, state: TrainState) -> bool:
        """Whether the loss has not become lower for `evaluate.early_stopping` evaluations."""
        return self.patience is not None and state.evaluations_since_best >= self.patience

    def run(self, state: TrainState, due: Due) -> TrainState:
        """Do what is due, and what a stop asks for; the state after it. Its time is no step's. Collective.

        Raises:
            StoppedError: the ranks have agreed to stop, and the run is saved.
            TrainingError: replicas hold different weights.
            CheckpointError: see Saver.
        """
        is_best = False
        if self.compare_every is not None:  # also before a save: what is saved is one replica's
            self._compare_replicas(state.step)
        if self.evaluations is not None and due.evaluation:
            state = self.evaluations.run(state)
            is_best = not state.owes_evaluation and state.best_step == state.step
        if self.stop.agreed is not None:
            self.saver.save_and_leave(state, self.stop.agreed)
        if due.checkpoint or self.stops_early(state) or (is_best and self.saver.keeps_best):
            self.saver.save_and_learn(state)
        elif due.snapshot:
            self.saver.save_snapshot(state)
        self.accounting.restart_clock()
        return state

    def _compare_replicas(self, step: int) -> None:
        """Raise TrainingError where replicas hold different weights. Collective."""
        differences = compare_replicas(self.engine.state_dict(), self.meshes)
        if differences:
            self.saver.wait()  # what is being saved was compared before
            for each in differences:
                self.accounting.event("replicas_differ", step=step, **asdict(each))
            raise TrainingError(describe_differences(differences, step))
