"""The mean loss of held-out sequences over all ranks, and what follows from it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from echelon.learn.objectives.objective import Objective

TAUGHT = ("cross_entropy", "kl", "entropy", "agreement")
"""The metrics of a model that learns from a teacher."""


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats per target token, and derived metrics; for preferences, per pair or per judged answer.

    For answers to prompts, the negative mean reward takes the place of the loss, so that less is better as elsewhere.
    """

    loss: float
    num_targets: int
    bytes_per_token: float | None
    num_pairs: int | None = None
    reward_accuracy: float | None = None
    """Fraction of pairs whose chosen answer has the larger reward, or of answers whose reward is on the right side."""
    reward_margin: float | None = None
    """Mean reward of the chosen, or good answers less that of the others; None if there are none of one kind."""
    num_answers: int | None = None
    solved: float | None = None
    """Fraction of the model's own answers with the full reward; None if there is none, as with a reward model."""
    cross_entropy: float | None = None
    """Of the labels, in nats per token, if the loss is a divergence from a teacher; None: it is the loss."""
    kl: float | None = None
    """Mean KL(teacher || model) per token."""
    entropy: float | None = None
    """Mean entropy of the model's predictions."""
    agreement: float | None = None
    """Fraction of tokens for which model and teacher think the same token likeliest."""

    @property
    def count(self) -> int:
        """The number of terms in the means: target tokens, pairs, or judged answers."""
        return next(count for count in (self.num_pairs, self.num_answers, self.num_targets) if count is not None)

    @property
    def is_of_answers(self) -> bool:
        """Whether the terms are answers or pairs of them, not tokens."""
        return self.num_pairs is not None or self.num_answers is not None

    @property
    def _token_loss(self) -> float:
        return self.loss if self.cross_entropy is None else self.cross_entropy

    @property
    def perplexity(self) -> float | None:
        """exp(cross-entropy); infinite on overflow. None for preferences, whose loss is not per token."""
        if self.is_of_answers:
            return None
        return math.exp(self._token_loss) if self._token_loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """cross-entropy / ln 2 * tokens / bytes, comparable between models of any tokenizer; None if unknown."""
        if not self.bytes_per_token or self.is_of_answers:
            return None
        return self._token_loss / math.log(2) / self.bytes_per_token

    def row(self) -> dict[str, float | int | None]:
        """Return the result as JSON values."""
        more = {} if self.num_answers is None else {"reward": -self.loss}
        more |= {} if self.solved is None else {"solved": self.solved}
        if self.kl is not None:
            more = {name: getattr(self, name) for name in TAUGHT}
        return more | {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "target_tokens": self.num_targets,
            "pairs": self.num_pairs,
            "answers": self.num_answers,
            "reward_accuracy": self.reward_accuracy,
            "reward_margin": self.reward_margin,
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
            _mean(results, [result.loss for result in results]) or 0.0,
            num_targets,
            sum(sizes) / num_targets if known else None,
            _total([result.num_pairs for result in results]),
            _mean(results, [result.reward_accuracy for result in results]),
            _mean(results, [result.reward_margin for result in results]),
            _total([result.num_answers for result in results]),
            _mean(results, [result.solved for result in results]),
            *(_mean(results, [getattr(result, name) for result in results]) for name in TAUGHT),
        )

    def select(self, name: str | None) -> EvalResult:
        """Return the result of the set that `evaluate.select_by` names; None for all sets together."""
        return self.whole if name is None else self.sets[name]

    def row(self, step: int) -> dict[str, Any]:
        """Return the row for metrics.jsonl."""
        sets = {name: result.row() for name, result in self.sets.items()}
        return {"kind": "eval", "step": step, **self.whole.row(), "sets": sets}


def _total(counts: Sequence[int | None]) -> int | None:
    """Return the sum of the known counts; None if there are none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _mean(results: Sequence[EvalResult], values: Sequence[float | None]) -> float | None:
    """Return the mean over the terms of all results; None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(results):
        return None
    counts = [result.count for result in results]
    return sum(value * count for value, count in zip(known, counts, strict=True)) / max(1, sum(counts))


def count_labels(objective: Objective, batch: Microbatch) -> Tensor:
    """Return a microbatch's number of loss terms and of labels, for the sums of an evaluation; fp64."""
    return torch.stack([objective.count(batch), (batch.labels != IGNORE).sum()]).double()


def build_result(objective: Objective, sums: Sequence[float], bytes_per_token: float | None) -> EvalResult:
    """Compute the result of a set from its sums: those of `count_labels`, then `Objective.evaluation_sums`."""
    count, num_labels, *totals = sums
    loss, *measures = [total / max(1.0, count) for total in totals]
    units = {"pairs": "num_pairs", "answers": "num_answers"}
    known = [None if math.isnan(value) else value for value in measures]
    values: dict[str, Any] = dict(zip(objective.measures, known, strict=True))
    if objective.unit in units:
        values[units[objective.unit]] = int(count)
    return EvalResult(loss, int(num_labels), bytes_per_token, **values)


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
    sums = torch.zeros(3 + len(objective.measures), dtype=torch.float64, device=device)
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
