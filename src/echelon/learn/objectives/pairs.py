"""Losses on pairs of a chosen and a rejected answer: DPO and variants, and without a reference ORPO, SimPO and CPO."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import DecoderOutputs, RunFn
from echelon.recipe.objective import ObjectiveConfig

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


@dataclass(frozen=True)
class DPO(PairObjective):
    """Direct preference optimization, on pairs of a chosen and a rejected answer (Rafailov et al. 2023,
    arXiv:2305.18290).

    `loss` names a function of this module, with the names of TRL's `DPOConfig.loss_type`. The growth g of an answer is
    its log-probability less that under the reference, summed over its tokens. The reward of an answer is beta g.
    `sft_weight` adds the cross-entropy of the chosen answers (RPO, Pang et al. 2024, arXiv:2404.19733), as
    TRL's loss type `sft` beside another one does: the mean over the tokens of the batch.
    """

    beta: float
    loss: str = "sigmoid"
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    needs_reference = True

    @override
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return LOSSES[self.loss](chosen, rejected, self.beta, self.label_smoothing)

    @override
    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.growth


def build_dpo(config: ObjectiveConfig) -> DPO:
    """Build the objective from the recipe's section."""
    return DPO(config.beta, config.loss_name, config.label_smoothing, config.sft_weight or 0.0)


PairLoss = Callable[[Answers, Answers, float, float], Tensor]
"""The loss of each pair: (chosen, rejected, beta, label_smoothing) to [batch, pairs]."""


def sigmoid(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """Equation 7 of Rafailov et al. 2023; conservative DPO for `wrong` > 0 (Mitchell 2023, "A note on DPO with noisy
    preferences")."""
    return smoothed_sigmoid(beta * _margin(chosen, rejected), wrong)


def sigmoid_norm(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """DPO with log-probabilities per token: length-normalised DPO (Lambert et al. 2024, arXiv:2411.15124)."""
    return -F.logsigmoid(beta * (chosen.mean_growth - rejected.mean_growth))


def hinge(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """max(0, 1 - beta m): the hinge loss of SLiC (Zhao et al. 2023, arXiv:2305.10425) on the margin of DPO (RSO, Liu
    et al. 2023, arXiv:2309.06657)."""
    return F.relu(1 - beta * _margin(chosen, rejected))


def ipo(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """(m - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036, equation 17). The margin m is of growths per token:
    TRL's authors confirmed with those of the paper that its results are of this form."""
    return (chosen.mean_growth - rejected.mean_growth - 1 / (2 * beta)) ** 2


def robust(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """The unbiased estimate of DPO's loss if labels are wrong with this probability (Chowdhury et al. 2024,
    arXiv:2403.00409)."""
    rewards = beta * _margin(chosen, rejected)
    return (-(1 - wrong) * F.logsigmoid(rewards) + wrong * F.logsigmoid(-rewards)) / (1 - 2 * wrong)


def exo_pair(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """The reverse KL divergence from the smoothed labels, which needs `wrong` > 0 (EXO, Ji et al. 2024,
    arXiv:2402.00856, equation 16)."""
    rewards = beta * _margin(chosen, rejected)
    likely, unlikely = F.logsigmoid(rewards), F.logsigmoid(-rewards)
    return likely.exp() * (likely - math.log1p(-wrong)) + unlikely.exp() * (unlikely - math.log(wrong))


def nca_pair(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """Noise contrastive alignment with one rejected answer (Chen et al. 2024, arXiv:2402.05369)."""
    good, bad = beta * chosen.growth, beta * rejected.growth
    return -F.logsigmoid(good) - 0.5 * F.logsigmoid(-good) - 0.5 * F.logsigmoid(-bad)


def sppo_hard(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """Self-play preference optimization (Wu et al. 2024, arXiv:2405.00675, equation 4.7), where the chosen answer wins
    with probability 1."""
    return (chosen.growth - 0.5 / beta) ** 2 + (rejected.growth + 0.5 / beta) ** 2


def apo_zero(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """Makes chosen answers likelier and rejected ones less likely (APO, D'Oosterlinck et al. 2024, arXiv:2408.06266,
    equation 7)."""
    return F.sigmoid(-beta * chosen.growth) + F.sigmoid(beta * rejected.growth)


def apo_down(chosen: Answers, rejected: Answers, beta: float, wrong: float) -> Tensor:
    """Makes both answers less likely, the rejected one more so: for chosen answers that are worse than the model's own
    (APO, D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8)."""
    return F.sigmoid(beta * chosen.growth) + F.sigmoid(-beta * _margin(chosen, rejected))


LOSSES: Mapping[str, PairLoss] = {
    loss.__name__: loss
    for loss in (
        sigmoid, sigmoid_norm, hinge, ipo, robust, exo_pair, nca_pair, sppo_hard, apo_zero, apo_down
    )
}  # fmt: skip
"""The losses by `objective.loss`."""


def _margin(chosen: Answers, rejected: Answers) -> Tensor:
    return chosen.growth - rejected.growth


def smoothed_sigmoid(rewards: Tensor, wrong: float) -> Tensor:
    """Return -(1 - w) log sigmoid(r) - w log sigmoid(-r) for the difference r of the rewards and `wrong` w."""
    return -(1 - wrong) * F.logsigmoid(rewards) - wrong * F.logsigmoid(-rewards)


@dataclass(frozen=True)
class ORPO(PairObjective):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691, equations 4 to 7).

    The cross-entropy of the chosen answers, plus beta (the paper's lambda) times -log sigmoid of the log of the ratio
    of odds p / (1 - p), where log p is the mean log-probability of an answer's tokens. The reward is beta log p. TRL's
    ORPOTrainer also has the cross-entropy of the prompt.
    """

    beta: float

    sft_weight = 1.0

    @override
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return -self.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))

    @override
    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean_score


def build_orpo(config: ObjectiveConfig) -> ORPO:
    """Build the objective from the recipe's section."""
    return ORPO(config.beta)


@dataclass(frozen=True)
class SimPO(PairObjective):
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, equation 6).

    -log sigmoid(r(chosen) - r(rejected) - gamma), where the reward r is beta times the mean log-probability of an
    answer's tokens. `label_smoothing` as for DPO. With `sft_weight` it is CPO-SimPO, which TRL has as the loss type
    `simpo` of its CPOTrainer.
    """

    beta: float
    gamma: float
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    @override
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        margins = self.rewards(chosen) - self.rewards(rejected) - self.gamma
        return smoothed_sigmoid(margins, self.label_smoothing)

    @override
    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean_score


def build_simpo(config: ObjectiveConfig) -> SimPO:
    """Build the objective from the recipe's section."""
    return SimPO(config.beta, config.gamma, config.label_smoothing, config.sft_weight or 0.0)


@dataclass(frozen=True)
class CPO(PairObjective):
    """Contrastive preference optimization (Xu et al. 2024, arXiv:2401.08417, equation 3).

    With the loss `sigmoid` it is that of DPO with a uniform reference; `hinge` and `ipo`, whose log-probabilities are
    per token, are TRL's other losses. The cross-entropy of the chosen answers is weighted by `sft_weight`. The reward
    is beta times the log-probability, with `ipo` that per token.
    """

    beta: float
    loss: str = "sigmoid"
    label_smoothing: float = 0.0
    sft_weight: float = 1.0

    @override
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        margins = self.rewards(chosen) - self.rewards(rejected)
        if self.loss == "hinge":
            return F.relu(1 - margins)
        if self.loss == "ipo":
            return (margins / self.beta - 1 / (2 * self.beta)) ** 2
        return smoothed_sigmoid(margins, self.label_smoothing)

    @override
    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * (answers.mean_score if self.loss == "ipo" else answers.score)


def build_cpo(config: ObjectiveConfig) -> CPO:
    """Build the objective from the recipe's section."""
    sft_weight = 1.0 if config.sft_weight is None else config.sft_weight
    return CPO(config.beta, config.loss_name, config.label_smoothing, sft_weight)


_LOG_HALF = -math.log(2)


def _log_odds(answers: Answers) -> Tensor:
    """Return log(p / (1 - p)) of the mean log-probabilities; 0 where there is no answer.

    Each form of log(1 - p) is exact on its side of p = 1/2.
    """
    scores = answers.mean_score.where(answers.tokens > 0, _LOG_HALF)
    is_likely = scores > _LOG_HALF
    near, far = scores.where(is_likely, -0.1), scores.where(~is_likely, -1.0)  # whose gradients are finite everywhere
    return scores - torch.where(is_likely, (-near.expm1()).log(), (-far.exp()).log1p())
