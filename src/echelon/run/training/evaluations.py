"""Evaluation during training: losses on held-out text, samples of the prompts, and benchmarks."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from echelon.ground.stop_request import StopRequest, agreed_stop
from echelon.learn.answers.sampling import Sampling, continue_prompts, find_end, row_seed
from echelon.learn.data.loader import Microbatch
from echelon.learn.data.prepared import ValidationSet
from echelon.learn.data.tokenizer import panics_told
from echelon.learn.distributed.objects import broadcast_object
from echelon.learn.engines.engine import Evaluation
from echelon.learn.evaluation import EvalResult, EvalResults
from echelon.learn.sync import Synchronizer
from echelon.recipe.batches import Rhythm
from echelon.run.training.evaluation_checks import TASKS, encode_prompts
from echelon.run.training.run_log import Accounting
from echelon.run.training.state import TrainState

if TYPE_CHECKING:
    from echelon.learn.answers.judging import AnswerJudge
    from echelon.learn.benchmarks.harness import TaskScores
    from echelon.learn.learner import Learner

logger = logging.getLogger(__name__)

DEFAULT_BATCHES = 200
ROUNDS_PER_LOOK = 16  # a stop request waits for at most this many microbatches
_PASSES_PER_LOOK = 16  # and in a benchmark for as many forward passes


class Benchmarks:
    """The tasks of `evaluate.tasks`, which lm-eval runs on the ranks that train; they are loaded once.

    Training goes on as if they had not run: see `Tasks.score`.
    """

    def __init__(self, learner: "Learner") -> None:
        """Find the tasks. Raises ConfigError as `open_tasks`."""
        from echelon.learn.benchmarks.harness import open_tasks  # it needs lm-eval

        self._learner = learner
        self._tasks = open_tasks(learner.recipe.evaluate.tasks, TASKS)

    @cached_property
    def rhythm(self) -> Rhythm:
        """The steps after which the tasks run."""
        return self._learner.recipe.task_rhythm(self._learner.data.train.num_samples)

    def run(self, look: Callable[[], None]) -> "TaskScores":
        """Return the metrics of all tasks, the same on every rank. Collective.

        `look`: called now and then, on all ranks between the same passes. It may raise to end the run of the tasks.
        """
        from echelon.learn.benchmarks.harness import quiet_harness
        from echelon.learn.benchmarks.harness_model import TrainingModel  # lm-eval is there

        learner, num_passes = self._learner, 0

        def before_pass() -> None:
            nonlocal num_passes
            num_passes += 1
            if num_passes % _PASSES_PER_LOOK == 0:
                look()

        with learner.engine.evaluation(learner.objective) as evaluation, quiet_harness():
            model = TrainingModel(learner, evaluation, before_pass)
            measured = self._tasks.score(model, learner.recipe.evaluate.tasks_limit, resamples=False)
        scores = broadcast_object(measured, learner.meshes.everyone)
        assert scores is not None, "the first rank has the results"
        return scores


class PromptSampler:
    """Continues `evaluate.prompts` with the same random draws at every evaluation.

    The draws equal those of `echelon generate` with default settings and the run's seed. Each token is a forward pass,
    also after all samples have ended: every rank runs the same passes.
    """

    def __init__(self, learner: "Learner") -> None:
        evaluate = learner.recipe.evaluate
        self.prompts = evaluate.prompts
        self._tokenizer = learner.tokenizer
        self._stops = frozenset(learner.stops)
        self._ids = encode_prompts(self.prompts, self._tokenizer)
        self._max_tokens = evaluate.prompt_tokens
        self._seed = learner.recipe.run.seed
        self._device = learner.device

    def describe(self) -> str:
        """Describe the cost in one line."""
        return (
            f"samples: {len(self.prompts)} prompts, {self._max_tokens} tokens each: {self._max_tokens} forward passes "
            "per evaluation"
        )

    def run(self, evaluation: Evaluation, beat: Callable[[], None] = lambda: None) -> list[str]:
        """Return the prompts with their continuations. Collective: all ranks run the same passes and draws.

        `beat` is called before the first forward pass and after each read of the tokens (`continue_prompts`).
        """
        seeds = [row_seed(self._seed, prompt, 0) for prompt in self.prompts]
        sampling = Sampling(self._max_tokens)

        def agree(goes_on: bool) -> bool:
            beat()
            return goes_on

        beat()
        continuations = continue_prompts(
            evaluation, self._ids, sampling, seeds, self._device, lambda number, tokens: False, agree
        )
        return [
            self._decode(ids + continued.tokens[: find_end(continued.tokens, self._stops)])
            for ids, continued in zip(self._ids, continuations, strict=True)
        ]

    def _decode(self, ids: list[int]) -> str:
        with panics_told(self._tokenizer.name_or_path, "a sample of evaluate.prompts"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class Interrupted(Exception):
    """All ranks have agreed to stop in the middle of an evaluation."""


@dataclass(frozen=True)
class Evaluations:
    """When and how a run is evaluated: the same sequences of every held-out set each time, in order, and benchmarks."""

    learner: "Learner"
    sync: Synchronizer
    sampler: PromptSampler | None
    accounting: Accounting
    stop: StopRequest
    judge: "AnswerJudge | None" = None
    """What evaluates a recipe with rewards."""
    benchmarks: Benchmarks | None = None
    """What runs `evaluate.tasks`."""

    @cached_property
    def rhythm(self) -> Rhythm:
        """The steps after which held-out text is evaluated."""
        return self.learner.recipe.evaluation_rhythm(self.learner.data.train.num_samples)

    def is_due(self, done: int) -> bool:
        """Whether an evaluation is due after this step by an interval; the last step is always evaluated."""
        return any(self._find_due(done))

    def _find_due(self, done: int) -> tuple[bool, bool]:
        """Whether held-out text and benchmarks are due after this step by their intervals."""
        has_texts, benchmarks = bool(self.learner.data.validation), self.benchmarks
        return has_texts and self.rhythm.is_due(done), benchmarks is not None and benchmarks.rhythm.is_due(done)

    def run(self, state: TrainState) -> TrainState:
        """Do what is due and return the new state; after a stop request the evaluation is still owed. Collective.

        At the last step, and where no interval has made it due, all is.
        """
        due = self._find_due(state.step)
        if not any(due) or state.step == self.learner.recipe.num_steps(self.learner.data.train.num_samples):
            due = (True, True)
        with self.accounting.goodput.spending("evaluating"):
            outcome = None if self.stop.agreed is not None else self._evaluate(state.step, *due)
        if outcome is None:
            return replace(state, owes_evaluation=True)
        (results, scores), recipe, value = outcome, self.learner.recipe, None
        if scores is not None and recipe.compared_task is not None:
            value = scores.find(recipe.compared_task)
        elif results is not None and recipe.compared_task is None:
            value = results.select(recipe.evaluate.select_by).loss
        return replace(state, owes_evaluation=False) if value is None else state.evaluated(value)

    def _evaluate(
        self, step: int, texts_are_due: bool, tasks_are_due: bool
    ) -> "tuple[EvalResults | None, TaskScores | None] | None":
        """Do what is due after a step, and write it once all is known; None if the run is asked to stop before."""
        self.accounting.note("evaluation", step)
        beat = partial(self.accounting.heartbeat.beat, f"the evaluation after step {step}")
        beat()
        results, texts, scores = None, None, None
        began = time.perf_counter()
        with self.sync.agreed():  # every replica has the same weights here
            try:
                if texts_are_due and self.learner.data.validation:
                    results = EvalResults(
                        {held_out.name: self._evaluate_set(held_out, beat) for held_out in self.learner.data.validation}
                    )
                    texts = self._sample(beat)
                if tasks_are_due and self.benchmarks is not None:
                    began = time.perf_counter()
                    with self.accounting.heartbeat.resting_together():  # lm-eval works long between two passes
                        scores = self.benchmarks.run(self._look)
            except Interrupted:
                return None
        if results is not None:
            self.accounting.write_evaluation(results.row(step))
            for failure in dict.fromkeys(text for result in results.sets.values() for text in result.failures):
                logger.warning(f"eval at step {step}: {failure}")
                self.accounting.event("reward_failed", step=step, message=failure)
        if scores is not None:
            seconds = time.perf_counter() - began
            self.accounting.write_evaluation(scores.row(step, seconds))
        if self.sampler is not None and texts is not None and self.accounting.journal is not None:
            self.accounting.journal.samples(step, self.sampler.prompts, texts)
        return results, scores

    def _sample(self, beat: Callable[[], None]) -> list[str] | None:
        if self.sampler is None:
            return None
        with self.learner.engine.evaluation(self.learner.objective) as evaluation:
            return self.sampler.run(evaluation, beat)

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
    judge: "AnswerJudge | None" = None,
) -> Evaluations | None:
    """Build the evaluations of a run, if there is held-out text or a benchmark."""
    benchmarks = Benchmarks(learner) if learner.recipe.evaluate.tasks else None
    if not learner.data.validation and benchmarks is None:
        return None
    return Evaluations(learner, sync, sampler, accounting, stop, judge, benchmarks)
