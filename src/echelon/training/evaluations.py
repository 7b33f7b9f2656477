"""Evaluation during training: losses on held-out text, and samples of the prompts."""

from dataclasses import dataclass, replace
from functools import partial

from echelon.engines import Engine
from echelon.inference.evaluate import EvalResults, Evaluator
from echelon.inference.sampler import PromptSampler
from echelon.objectives.objective import Objective
from echelon.recipe.batches import Rhythm
from echelon.stopping import StopRequest
from echelon.sync import Synchronizer
from echelon.training.accounting import Accounting
from echelon.training.state import TrainState


@dataclass(frozen=True)
class Evaluations:
    """When and how a run with held-out text is evaluated.

    Attributes:
        select_by: the validation set that determines the best step; None for all sets together.
    """

    engine: Engine
    objective: Objective
    sync: Synchronizer
    evaluator: Evaluator
    sampler: PromptSampler | None
    rhythm: Rhythm
    select_by: str | None
    accounting: Accounting
    stop: StopRequest

    def is_due(self, done: int) -> bool:
        """Whether an evaluation is due after this step by the interval; the last step is always evaluated."""
        return self.rhythm.is_due(done)

    def run(self, state: TrainState) -> TrainState:
        """Evaluate and return the new state; after a stop request the evaluation is still owed. Collective."""
        with self.accounting.spending("evaluating"):
            results = None if self.stop.agreed is not None else self._evaluate(state.step)
        if results is None:
            return replace(state, owes_evaluation=True)
        return state.evaluated(results.select(self.select_by).loss)

    def _evaluate(self, step: int) -> EvalResults | None:
        self.accounting.note("evaluation", step)
        beat = partial(self.accounting.heart.beat, f"the evaluation after step {step}")
        beat()
        with self.sync.agreed(), self.engine.evaluation(self.objective) as evaluation:
            results = self.evaluator.run(evaluation, self.stop, beat)
            if results is None:
                self.stop.agreed = self.evaluator.stopped_by
                return None
            texts = None if self.sampler is None else self.sampler.run(evaluation, beat)
        self.accounting.write_evaluation(step, results)
        if self.sampler is not None and texts is not None and self.accounting.journal is not None:
            self.accounting.journal.samples(step, self.sampler.prompts, texts)
        return results
