"""What a model computes without being trained: the mean loss of held-out sequences, log-probabilities, answers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, astuple, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.learn.data.loader import (
    LONGEST,
    BatchPlace,
    Microbatch,
    Padding,
    StepBatch,
    build_rows,
    choose_padding,
    mismatch,
)
from echelon.learn.data.shards import GOOD, Dataset
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.engines.engine import Evaluation
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.loss_function import LossFn
from echelon.learn.objectives.objective import Objective, as_objective, find_labels, with_batch_means
from echelon.planner.plan import ParallelPlan

if TYPE_CHECKING:
    from echelon.learn.answers.rollouts import Rollouts
    from echelon.learn.answers.sampling import Sampling

TOKENS = "target_tokens"
"""The unit of losses per target token."""

_TOKEN_LOSS = "cross_entropy"
"""The measure that is the cross-entropy of the labels in nats per token, where the loss is something else."""


@dataclass(frozen=True)
class LabelCounts:
    """How often a classifier met a label: the texts that have it, those that it gave it, and those of both."""

    texts: int
    predicted: int
    right: int

    @property
    def f1(self) -> float | None:
        """2 right / (texts + predicted); None for a label that no text has or gets."""
        return 2 * self.right / (self.texts + self.predicted) if self.texts + self.predicted else None


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats per target token, and derived metrics; per pair, answer or text for objectives on such.

    For answers to prompts, the negative mean reward takes the place of the loss, so that less is better as elsewhere.
    `unit`: of what the loss is the mean, `count` how many there were, `measures` further means over them; None for one
    that is not known. The loss is None if there were none: that is no result. `labels`: of a classifier. `failures`:
    why answers could not be judged, a sentence each.
    """

    loss: float | None
    num_targets: int
    bytes_per_token: float | None
    unit: str
    count: int
    measures: Mapping[str, float | None] = field(default_factory=dict)
    labels: Mapping[str, LabelCounts] = field(default_factory=dict)
    failures: Sequence[str] = ()

    @property
    def is_per_token(self) -> bool:
        """Whether the terms are tokens, not answers, pairs of them, or texts."""
        return self.unit == TOKENS

    @property
    def _token_loss(self) -> float | None:
        token_loss = self.measures.get(_TOKEN_LOSS)
        return None if not self.is_per_token else self.loss if token_loss is None else token_loss

    @property
    def perplexity(self) -> float | None:
        """exp(cross-entropy); infinite on overflow. None for a loss that is unknown or not per token."""
        loss = self._token_loss
        return None if loss is None else math.exp(loss) if loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """cross-entropy / ln 2 * tokens / bytes, comparable between models of any tokenizer; None if unknown."""
        loss = self._token_loss
        return loss / math.log(2) / self.bytes_per_token if self.bytes_per_token and loss is not None else None

    @property
    def own_measures(self) -> dict[str, Any]:
        """What an objective measures besides the loss, as JSON values; of a classifier accuracy, F1 and labels.

        `macro_f1` is the mean F1 of the labels that some text has or gets.
        """
        if not self.labels:
            return dict(self.measures)
        counts_of_labels = self.labels.values()
        scores = [counts.f1 for counts in counts_of_labels if counts.f1 is not None]
        return {
            **self.measures,
            "accuracy": sum(counts.right for counts in counts_of_labels) / self.count if self.count else None,
            "macro_f1": sum(scores) / len(scores) if scores else None,
            "labels": {name: asdict(counts) for name, counts in self.labels.items()},
        }

    def row(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "pairs": None,
            "answers": None,
            "reward_accuracy": None,
            "reward_margin": None,
            self.unit: self.count,
            TOKENS: self.num_targets,
            **self.own_measures,
        }


@dataclass(frozen=True)
class EvalResults:
    """The result of each named validation set."""

    sets: dict[str, EvalResult]

    @property
    def whole(self) -> EvalResult:
        """The result over all sets as one text: every target token, pair, or answer, counts once."""
        results = list(self.sets.values())
        num_targets = sum(result.num_targets for result in results)
        sizes = [
            result.num_targets * result.bytes_per_token for result in results if result.bytes_per_token is not None
        ]
        known = num_targets > 0 and len(sizes) == len(self.sets)
        return EvalResult(
            _mean(results, [result.loss for result in results]),
            num_targets,
            sum(sizes) / num_targets if known else None,
            results[0].unit if results else TOKENS,
            sum(result.count for result in results),
            *_join(results),
        )

    def select(self, name: str | None) -> EvalResult:
        """Return the result of the set that `evaluate.select_by` names; None for all sets together."""
        return self.whole if name is None else self.sets[name]

    def row(self, step: int) -> dict[str, Any]:
        """Return the row for metrics.jsonl."""
        sets = {name: result.row() for name, result in self.sets.items()}
        return {"kind": "eval", "step": step, **self.whole.row(), "sets": sets}


def _join(results: Sequence[EvalResult]) -> tuple[dict[str, float | None], dict[str, LabelCounts]]:
    """Return the measures and the labels of all results together."""
    names = dict.fromkeys(name for result in results for name in result.measures)
    measures = {name: _mean(results, [result.measures.get(name) for result in results]) for name in names}
    counts: dict[str, list[LabelCounts]] = {}
    for result in results:
        for name, found in result.labels.items():
            counts.setdefault(name, []).append(found)
    labels = {
        name: LabelCounts(*(sum(numbers) for numbers in zip(*map(astuple, found), strict=True)))
        for name, found in counts.items()
    }
    return measures, labels


def _mean(results: Sequence[EvalResult], values: Sequence[float | None]) -> float | None:
    """Return the mean over the terms of all results; None if there are none, or one of the values is unknown."""
    counted = [(value, result.count) for value, result in zip(values, results, strict=True) if result.count]
    terms = [value * count for value, count in counted if value is not None]
    return sum(terms) / sum(count for _, count in counted) if counted and len(terms) == len(counted) else None


def count_labels(objective: Objective, batch: Microbatch) -> Tensor:
    """Return a microbatch's number of loss terms and of labels, for the sums of an evaluation; fp64."""
    return torch.stack([objective.count(batch), (batch.labels != IGNORE).sum()]).double()


def build_result(objective: Objective, sums: Sequence[float], bytes_per_token: float | None) -> EvalResult:
    """Compute the result of a set from its sums: those of `count_labels`, then `Objective.evaluation_sums`."""
    count, num_labels, *totals = sums
    num_means = 1 + len(objective.measures)
    loss, *means = [total / count if count else None for total in totals[:num_means]]
    measures = {
        name: None if value is None or math.isnan(value) else value
        for name, value in zip(objective.measures, means, strict=True)
    }
    of_labels = np.array(totals[num_means:], dtype=np.int64).reshape(-1, 3).tolist()
    labels = {name: LabelCounts(*counts) for name, counts in zip(find_labels(objective), of_labels, strict=True)}
    return EvalResult(loss, int(num_labels), bytes_per_token, objective.unit, int(count), measures, labels)


def sum_up(
    evaluation: Evaluation,
    objective: Objective,
    microbatches: Iterable[Microbatch],
    add_up: Callable[[Tensor], object],
    device: torch.device,
) -> EvalResult:
    """Return the mean loss of microbatches over all ranks. Collective.

    An objective with `batch_means` takes them over all microbatches, which are read twice and kept in host memory.

    Args:
        add_up: sums a tensor in place over the ranks with other sequences.
    """
    num_sums = 3 + len(objective.measures) + 3 * len(find_labels(objective))
    sums = torch.zeros(num_sums, dtype=torch.float64, device=device)
    if objective.batch_means:
        microbatches = list(microbatches)
        num_terms = torch.stack([objective.count(microbatch) for microbatch in microbatches]).sum().to(device)
        add_up(num_terms)
        microbatches = with_batch_means(objective, microbatches, num_terms.clamp(min=1), evaluation.run, add_up)
    for microbatch in microbatches:
        on_device = microbatch.to(device)
        sums[:2] += count_labels(objective, on_device)
        sums[2:] += evaluation.sums(on_device)
    add_up(sums)
    return build_result(objective, sums.tolist(), None)


def read_in_order(dataset: Dataset, start: int, count: int, stop: int, padding: Padding = LONGEST) -> Microbatch:
    """Read sequences start..start+count of a dataset; those from `stop` on repeat sequence 0 without targets."""
    ids = np.arange(start, start + count, dtype=np.int64)
    inside = ids < stop
    samples, mismatched = dataset.read_samples(np.where(inside, ids, 0)), None
    if GOOD in samples.extra:
        mismatched = mismatch(samples, dataset.read_samples(np.where(inside, ids - 1, 0) % stop))
    samples.labels[~inside] = IGNORE
    return build_rows(samples, slice(None), ids, ids, padding, mismatched)


class ModelPasses(Protocol):
    """What a model, of which each rank may hold a part, computes without being trained. Its methods are collective."""

    plan: ParallelPlan
    meshes: Meshes
    device: torch.device

    @property
    def objective(self) -> Objective:
        """What the model is trained for, which evaluates it where no other loss is given."""

    @property
    def stops(self) -> list[int]:
        """The token ids that end an answer."""

    @property
    def place(self) -> BatchPlace:
        """Which sequences of every batch this rank feeds, and in which form."""

    def passes(self, objective: Objective) -> AbstractContextManager[Evaluation]:
        """Return a scope of forward passes without gradients or dropout."""

    def find_objective(self, loss: Objective | LossFn | None) -> Objective:
        """Return a loss as an objective; that of the model for None. Raises ConfigError if it needs what is missing."""
        return self.objective if loss is None else as_objective(loss)

    def log_probabilities(self, batch: StepBatch, temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probability of every label of a batch, without dropout and gradient. Collective.

        One tensor for each microbatch: [batch, seq], fp32, 0 where there is no label. Under context parallelism it is
        for the positions of this rank, [batch, seq / cp]. `temperature`: divides the logits, as in sampling.
        """
        microbatches = batch.to(self.device).microbatches
        with self.passes(self.objective) as evaluation:
            return [evaluation.log_probabilities(microbatch, temperature) for microbatch in microbatches]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: "Sampling",
        stops: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
        max_num_seqs: int | None = None,
    ) -> "Rollouts":
        """Answer prompts with the weights as they are now, `sampling.num_samples` times each. Collective.

        It keeps keys and values (a KV cache), except with `pp` and under engines that have none. Weights stay sharded
        as in a forward pass of the plan, and neither they nor the random state change. The draws depend on the prompt,
        the number of the sample and `sampling.seed`, not on the number of ranks; give each step another seed. Answers
        that have ended leave the batch, and others take their place, unless the model keeps more than keys and values.

        Args:
            prompts: token ids of this rank's prompts, at least one. Ranks with one `meshes.data_rank` give the same.
            sampling: the same on every rank, without `stop`.
            stops: token ids that end an answer; None: `self.stops`.
            numbers: of each prompt the number of its first sample; None: 0. The draws of a conversation that goes on
                depend on it, where several have the same text.
            max_num_seqs: answers that this rank samples at the same time, at most, which bounds the memory of the
                cache; None: as many as the plan says, which is all if the recipe does not train from rewards.

        Raises:
            ConfigError: on every rank, if what one of them gives cannot be used.
        """
        from echelon.learn.answers.rollouts import generate  # a loop that evaluates needs none of it

        ends = self.stops if stops is None else stops
        planned = None if self.plan.rollout is None else self.plan.rollout.max_num_seqs
        size = planned if max_num_seqs is None else max_num_seqs
        with self.passes(self.objective) as evaluation:
            return generate(evaluation, self.meshes, self.device, prompts, sampling, ends, self.place, numbers, size)

    def evaluate(self, batches: Iterable[StepBatch | Microbatch], loss: Objective | LossFn | None = None) -> EvalResult:
        """Return the mean loss of batches over all ranks, without dropout and gradient. Collective.

        Every rank must give the same number of microbatches, as `held_out` does.
        """
        objective = self.find_objective(loss)
        with self.passes(objective) as evaluation:
            whole = chain.from_iterable(
                batch.microbatches if isinstance(batch, StepBatch) else (batch,) for batch in batches
            )
            return sum_up(evaluation, objective, whole, self.add_up, self.device)

    def add_up(self, sums: Tensor) -> None:
        """Sum a tensor in place over the ranks that read different sequences. Collective."""
        for group in (self.meshes.loss, self.meshes.outer):
            if group is not None:
                dist.all_reduce(sums, group=group)

    def held_out(
        self, dataset: Dataset, num_sequences: int | None = None, micro_batch_size: int | None = None
    ) -> Iterator[Microbatch]:
        """Yield this rank's microbatches of a held-out set (`data.validation`), in order; None: all of it.

        Every rank gets the same number of them; the last ones are filled with sequences without targets.
        """
        count = dataset.num_samples if num_sequences is None else min(num_sequences, dataset.num_samples)
        size, padding = micro_batch_size or self.plan.micro_batch_size, choose_padding(self.plan)
        for first in range(0, count, size * self.meshes.data_size):
            start = first + self.meshes.data_rank * size
            yield read_in_order(dataset, start, size, count, padding).cut(self.meshes.sequence_part)
