"""What objectives on pairs of a chosen and a rejected answer have in common."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import DecoderOutputs, RunFn

CHOSEN_TOKENS = "chosen_tokens"
"""The mean number of labels of a chosen answer, in `Microbatch.extra`."""


@dataclass(frozen=True)
class Answers:
    """The chosen or the rejected answers of a microbatch: [batch, pairs], fp32.

    `score`: the log-probability of an answer, summed over its tokens. `reference`: that of the reference; 0 without
    one. `tokens`: the number of its labels. `margin`: by how much the chosen one should score more. All are 0 where
    there is no answer, and losses must be finite there.
    """

    score: Tensor
    reference: Tensor
    tokens: Tensor
    margin: Tensor | float = 0.0

    @property
    def growth(self) -> Tensor:
        """The log-probability less that of the reference."""
        return self.score - self.reference

    @property
    def mean_score(self) -> Tensor:
        """The log-probability per token."""
        return self.score / self.tokens.clamp(min=1)

    @property
    def mean_growth(self) -> Tensor:
        """`growth` per token."""
        return self.growth / self.tokens.clamp(min=1)


class PairObjective(Objective):
    """A loss on pairs. A pair is two consecutive documents of a sequence, of which the chosen one has an even index.

    It counts if any of its tokens has a label. With `sft_weight` w, w times the cross-entropy of the chosen answers is
    added, the mean over all their tokens in the batch.
    """

    beta: float
    sft_weight: float
    unit = "pairs"
    measures = ("reward_accuracy", "reward_margin")

    @property
    @override
    def batch_means(self) -> tuple[str, ...]:
        """The cross-entropy is a mean over tokens, while the terms are pairs."""
        return (CHOSEN_TOKENS,) if self.sft_weight else ()

    @override
    def batch_sums(self, batch: Microbatch, run: RunFn) -> Tensor:
        return sum_by_document((batch.labels != IGNORE).float(), batch)[:, 0::2].sum().reshape(1)

    @abstractmethod
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the loss of each pair without the cross-entropy, [batch, pairs]."""

    @abstractmethod
    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward of each answer, [batch, pairs], as evaluation reports it."""

    @override
    def count(self, batch: Microbatch) -> Tensor:
        """Count the pairs with a label."""
        return labelled_pairs(batch).sum()

    @override
    def token_weights(self, batch: Microbatch) -> Tensor:
        """Return equal weights for the labelled tokens of a pair, which add up to 1 per pair."""
        labelled = (batch.labels != IGNORE).float()
        of_document = sum_by_document(labelled, batch)
        of_pair = of_document[:, 0::2] + of_document[:, 1::2]
        assert batch.documents is not None
        return labelled / of_pair.gather(1, batch.documents.clamp(min=0) // 2).clamp(min=1)

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss of the pairs."""
        chosen, rejected = self._read(outputs, batch)
        return self._add_up(chosen, rejected, batch)

    @override
    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, the number of chosen answers with the larger reward, and the summed reward margin."""
        chosen, rejected = self._read(outputs, batch)
        margins = (self.rewards(chosen) - self.rewards(rejected)) * labelled_pairs(batch)
        return torch.stack([self._add_up(chosen, rejected, batch), (margins > 0).sum().float(), margins.sum()])

    def _add_up(self, chosen: Answers, rejected: Answers, batch: Microbatch) -> Tensor:
        counts = labelled_pairs(batch)
        total = (self.losses(chosen, rejected) * counts).sum()
        if not self.sft_weight:
            return total
        tokens = batch.extra[CHOSEN_TOKENS]  # 0 if there are none at all
        crossed = -(chosen.score * counts).sum(1) / tokens.where(tokens > 0, 1.0)
        return total + self.sft_weight * crossed.sum()

    def _read(self, outputs: DecoderOutputs, batch: Microbatch) -> tuple[Answers, Answers]:
        labels = batch.labels
        tokens = sum_by_document((labels != IGNORE).float(), batch)
        reference = torch.zeros_like(tokens)
        if self.needs_reference:  # first, so that its activations are gone before the others are kept
            reference = sum_by_document(outputs.reference_log_probabilities(labels), batch)
        scores = sum_by_document(outputs.log_probabilities(labels), batch)
        chosen, rejected = (Answers(scores[:, n::2], reference[:, n::2], tokens[:, n::2]) for n in (0, 1))
        return chosen, rejected


def labelled_pairs(batch: Microbatch) -> Tensor:
    """Return which pairs exist: boolean [batch, pairs], with space for the most pairs that a sequence can have."""
    labels = sum_by_document((batch.labels != IGNORE).float(), batch)
    return labels[:, 0::2] + labels[:, 1::2] > 0


def sum_by_document(values: Tensor, batch: Microbatch) -> Tensor:
    """Sum values over each document of a sequence: [batch, seq] to [batch, documents].

    The result has space for the largest possible (even) number of documents: the actual number is only known on the
    device. Padding has no labels, so its zeros may be added to any document.
    """
    assert batch.documents is not None, "answers are documents"
    num_rows, length = values.shape
    width = length + length % 2
    rows = torch.arange(num_rows, device=values.device)[:, None] * width
    places = rows + batch.documents.clamp(min=0)
    return values.new_zeros(num_rows * width).index_add(0, places.flatten(), values.flatten()).view(num_rows, width)
