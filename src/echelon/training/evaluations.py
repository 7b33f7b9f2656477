"""Evaluating a run while it trains: losses on the held-out text, and samples of the prompts."""

from dataclasses import dataclass, replace
from functools import partial

from echelon.engines import Engine
from echelon.inference.evaluate import EvalResults, Evaluator
from echelon.inference.sampler import PromptSampler
from echelon.recipe.batches import Rhythm
from echelon.stopping import StopRequest
from echelon.training.accounting import Accounting
from echelon.training.state import TrainState


@dataclass(frozen=True)
class Evaluations:
    """When and how a run is evaluated; of a run that holds text out.

    Attributes:
        select_by: the validation set that says which step was best; None: all of them together.
    """

    engine: Engine
    evaluator: Evaluator
    sampler: PromptSampler | None
    rhythm: Rhythm
    select_by: str | None
    accounting: Accounting
    stop: StopRequest

    def is_due(self, done: int) -> bool:
        """Whether one is due after this step by its rhythm; after the last step one always is."""
        return self.rhythm.is_due(done)

    def run(self, state: TrainState) -> TrainState:
        """Evaluate, and say how good the run is now; it owes the evaluation where a stop comes first. Collective."""
        with self.accounting.spending("evaluating"):
            results = None if self.stop.agreed is not None else self._evaluate(state.step)
        if results is None:
            return replace(state, owes_evaluation=True)
        return state.evaluated(results.select(self.select_by).loss)

    def _evaluate(self, step: int) -> EvalResults | None:
        self.accounting.note("evaluation", step)
        with self.engine.evaluation() as evaluation:
            beat = partial(self.accounting.heart.beat, f"the evaluation after step {step}")
            results = self.evaluator.run(evaluation, self.stop, beat)
            if results is None:
                self.stop.agreed = self.evaluator.stopped_by
                return None
            texts = None if self.sampler is None else self.sampler.run(evaluation)
        self.accounting.write_evaluation(step, results)
        if self.sampler is not None and texts is not None and self.accounting.journal is not None:
            self.accounting.journal.samples(step, self.sampler.prompts, texts)
        return results
