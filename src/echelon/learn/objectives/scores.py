"""Losses on the scores of texts: reward models, and classifiers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import DecoderOutputs
from echelon.learn.objectives.pairs import Answers, PairObjective, sum_by_document
from echelon.recipe.objective import ObjectiveConfig


@dataclass(frozen=True)
class Reward(PairObjective):
    """A reward model on pairs, by the model of Bradley and Terry (Ouyang et al. 2022, arXiv:2203.02155, equation 1).

    -log sigmoid(r(chosen) - r(rejected) - margin), where the reward r is the score of prompt and answer, and the margin
    is that of the pair, 0 if the data has none (Touvron et al. 2023, arXiv:2307.09288, equation 2). With
    `center_weight` w, w (r(chosen) + r(rejected))^2 is added, which keeps rewards around 0 (Eisenstein et al. 2023,
    arXiv:2312.09244).
    """

    center_weight: float = 0.0

    sft_weight = 0.0

    @override
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        losses = -F.logsigmoid(chosen.score - rejected.score - chosen.margin)
        return losses + self.center_weight * (chosen.score + rejected.score).square()

    @override
    def rewards(self, answers: Answers) -> Tensor:
        return answers.score

    @override
    def _read(self, outputs: DecoderOutputs, batch: Microbatch) -> tuple[Answers, Answers]:
        """Return both answers of each pair. The only label of an answer is at its last token (see `ScoreRule`)."""
        labelled = batch.labels != IGNORE
        scores = sum_by_document(outputs.scores()[..., 0].where(labelled, 0.0), batch)
        halves = sum_by_document(batch.labels.where(labelled, 0), batch)
        tokens, zeros = sum_by_document(labelled.float(), batch), torch.zeros_like(scores)
        margins = join_margins(halves[:, 0::2], halves[:, 1::2])
        chosen, rejected = (Answers(scores[:, n::2], zeros[:, n::2], tokens[:, n::2], margins) for n in (0, 1))
        return chosen, rejected


def join_margins(high: Tensor, low: Tensor) -> Tensor:
    """Return the margins, fp32, of the labels that `split_margin` gave; int64, of any shape."""
    bits = (high << 16) | low
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


@dataclass(frozen=True)
class Classification(Objective):
    """A classifier: the cross-entropy of each text's label under the softmax of its scores.

    It is the loss of `*ForSequenceClassification` of `transformers` with one label per text. A text's scores are those
    at its last token, where its only label is (see `ScoreRule`): the number of one of `labels`.
    """

    labels: tuple[str, ...]

    unit = "texts"

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss of the texts."""
        return _cross_entropy_sum(outputs.scores(), batch.labels)

    @override
    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, and for each label its texts, those that get it, and those of which both is true."""
        scores, numbers = outputs.scores(), torch.arange(len(self.labels), device=batch.labels.device)
        has_label = batch.labels[..., None] == numbers
        is_given = (scores.argmax(-1)[..., None] == numbers) & (batch.labels != IGNORE)[..., None]
        counts = [counted.sum((0, 1)) for counted in (has_label, is_given, has_label & is_given)]
        loss = _cross_entropy_sum(scores, batch.labels)
        return torch.cat([loss.reshape(1), torch.stack(counts, dim=1).flatten().float()])


def _cross_entropy_sum(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy of labels [batch, seq] under scores [batch, seq, labels]."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def build_classification(config: ObjectiveConfig) -> Classification:
    """Build the objective from the recipe's section."""
    return Classification(config.labels)


def build_reward(config: ObjectiveConfig) -> Reward:
    """Build the objective from the recipe's section."""
    return Reward(config.center_weight)
