"""The mean loss of held-out sequences over all ranks, and what follows from it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.learn.data.loader import LONGEST, Microbatch, Padding, StepBatch, build_rows
from echelon.learn.data.mismatched import mismatch
from echelon.learn.data.shards import GOOD, Dataset
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.engines.engine import Evaluation
from echelon.learn.objectives.batch_means import with_batch_means
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective, find_labels

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
        known = self.measures.get(_TOKEN_LOSS)
        return None if not self.is_per_token else self.loss if known is None else known

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
        found = self.labels.values()
        known = [counts.f1 for counts in found if counts.f1 is not None]
        return {
            **self.measures,
            "accuracy": sum(counts.right for counts in found) / self.count if self.count else None,
            "macro_f1": sum(known) / len(known) if known else None,
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
    known = [value * count for value, count in counted if value is not None]
    return sum(known) / sum(count for _, count in counted) if counted and len(known) == len(counted) else None


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


def evaluate(
    evaluation: Evaluation,
    objective: Objective,
    batches: Iterable[StepBatch | Microbatch],
    meshes: Meshes,
    device: torch.device,
) -> EvalResult:
    """Return the mean loss of batches over all ranks. Collective: each rank gives the same number of microbatches."""

    def add_up(sums: Tensor) -> None:
        for group in (meshes.loss, meshes.outer):
            if group is not None:
                dist.all_reduce(sums, group=group)

    whole = chain.from_iterable(batch.microbatches if isinstance(batch, StepBatch) else (batch,) for batch in batches)
    return sum_up(evaluation, objective, whole, add_up, device)


def sum_up(
    evaluation: Evaluation,
    objective: Objective,
    microbatches: Iterable[Microbatch],
    add_up: Callable[[Tensor], object],
    device: torch.device,
    bytes_per_token: float | None = None,
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
        here = microbatch.to(device)
        sums[:2] += count_labels(objective, here)
        sums[2:] += evaluation.sums(here)
    add_up(sums)
    return build_result(objective, sums.tolist(), bytes_per_token)


def read_held_out(
    dataset: Dataset, num_sequences: int, micro_batch_size: int, meshes: Meshes, padding: Padding = LONGEST
) -> Iterator[Microbatch]:
    """Yield this rank's microbatches of the first sequences of a dataset.

    Every rank gets the same number of them; the last ones are filled with sequences without targets.
    """
    for first in range(0, num_sequences, micro_batch_size * meshes.data_size):
        start = first + meshes.data_rank * micro_batch_size
        yield read_in_order(dataset, start, micro_batch_size, num_sequences, padding).cut(meshes.sequence_part)


def read_in_order(dataset: Dataset, start: int, count: int, stop: int, padding: Padding = LONGEST) -> Microbatch:
    """Read sequences start..start+count of a dataset; those from `stop` on repeat sequence 0 without targets."""
    ids = np.arange(start, start + count, dtype=np.int64)
    inside = ids < stop
    samples, mismatched = dataset.read_samples(np.where(inside, ids, 0)), None
    if GOOD in samples.extra:
        mismatched = mismatch(samples, dataset.read_samples(np.where(inside, ids - 1, 0) % stop))
    samples.labels[~inside] = IGNORE
    return build_rows(samples, slice(None), ids, ids, padding, mismatched)
