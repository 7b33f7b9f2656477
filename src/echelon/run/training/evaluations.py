"""Evaluation during training: losses on held-out text, and samples of the prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from echelon.ground.stop_request import StopRequest, agreed_stop
from echelon.learn.data.loader import Microbatch
from echelon.learn.data.prepared import ValidationSet
from echelon.learn.evaluation import EvalResult, EvalResults
from echelon.learn.sync import Synchronizer
from echelon.recipe.batches import Rhythm
from echelon.run.training.prompt_sampler import PromptSampler
from echelon.run.training.run_log import Accounting
from echelon.run.training.state import TrainState

if TYPE_CHECKING:
    from echelon.learn.judging import Judge
    from echelon.learn.learner import Learner

DEFAULT_BATCHES = 200
ROUNDS_PER_LOOK = 16  # a stop request waits for at most this many microbatches


class Interrupted(Exception):
    """All ranks have agreed to stop in the middle of an evaluation."""


@dataclass(frozen=True)
class Evaluations:
    """When and how a run with held-out text is evaluated: the same sequences of every set each time, in order."""

    learner: "Learner"
    sync: Synchronizer
    sampler: PromptSampler | None
    accounting: Accounting
    stop: StopRequest
    judge: "Judge | None" = None
    """What evaluates a recipe with rewards."""

    @cached_property
    def rhythm(self) -> Rhythm:
        """The steps after which an evaluation is due."""
        return self.learner.recipe.evaluation_rhythm(self.learner.data.train.num_samples)

    def is_due(self, done: int) -> bool:
        """Whether an evaluation is due after this step by the interval; the last step is always evaluated."""
        return self.rhythm.is_due(done)

    def run(self, state: TrainState) -> TrainState:
        """Evaluate and return the new state; after a stop request the evaluation is still owed. Collective."""
        with self.accounting.spending("evaluating"):
            results = None if self.stop.agreed is not None else self._evaluate(state.step)
        if results is None:
            return replace(state, owes_evaluation=True)
        return state.evaluated(results.select(self.learner.recipe.evaluate.select_by).loss)

    def _evaluate(self, step: int) -> EvalResults | None:
        self.accounting.note("evaluation", step)
        beat = partial(self.accounting.heart.beat, f"the evaluation after step {step}")
        beat()
        with self.sync.agreed():  # every replica has the same weights here
            try:
                sets = {held_out.name: self._evaluate_set(held_out, beat) for held_out in self.learner.data.validation}
            except Interrupted:
                return None
            results = EvalResults(sets)
            texts = None
            if self.sampler is not None:
                with self.learner.engine.evaluation(self.learner.objective) as evaluation:
                    texts = self.sampler.run(evaluation, beat)
        self.accounting.write_evaluation(step, results)
        if self.sampler is not None and texts is not None and self.accounting.journal is not None:
            self.accounting.journal.samples(step, self.sampler.prompts, texts)
        return results

    def _evaluate_set(self, held_out: ValidationSet, beat: Callable[[], None]) -> EvalResult:
        recipe = self.learner.recipe
        num_sequences = (recipe.evaluate.batches or DEFAULT_BATCHES) * recipe.global_batch_size
        if self.judge is not None:
            beat()
            return self.judge.evaluate(held_out.dataset, num_sequences)
        batches = self.learner.held_out(held_out.dataset, num_sequences)
        result = self.learner.evaluate(self._watched(batches, beat))
        return replace(result, bytes_per_token=held_out.bytes_per_token)

    def _watched(self, batches: Iterator[Microbatch], beat: Callable[[], None]) -> Iterator[Microbatch]:
        """The same batches, with a heartbeat before each. Raises Interrupted once a rank was asked to stop."""
        for number, microbatch in enumerate(batches, start=1):
            if number % ROUNDS_PER_LOOK == 0:
                self._look()
            beat()
            yield microbatch

    def _look(self) -> None:
        flags = torch.tensor(self.stop.flags(), dtype=torch.float64, device=self.learner.device)
        dist.all_reduce(flags, group=self.learner.meshes.everyone)
        stopped_by = agreed_stop(flags.tolist())
        if stopped_by is not None:
            self.stop.agreed = stopped_by
            raise Interrupted


def build_evaluations(
    learner: "Learner",
    sync: Synchronizer,
    sampler: PromptSampler | None,
    accounting: Accounting,
    stop: StopRequest,
    judge: "Judge | None" = None,
) -> Evaluations | None:
    """Build the evaluations of a run, if there is held-out text."""
    return Evaluations(learner, sync, sampler, accounting, stop, judge) if learner.data.validation else None


def build_sampler(learner: "Learner") -> PromptSampler | None:
    """Build the sampler that continues `evaluate.prompts` at each evaluation, if there are any."""
    wanted = learner.recipe.evaluate
    if not wanted.prompts:
        return None
    seed, stops = learner.recipe.run.seed, learner.stops
    return PromptSampler(wanted.prompts, wanted.prompt_tokens, learner.tokenizer, stops, seed, learner.device)
