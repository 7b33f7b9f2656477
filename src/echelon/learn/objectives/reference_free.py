"""Losses on pairs that compare with no reference: ORPO, SimPO and CPO."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.learn.objectives.dpo import smoothed_sigmoid
from echelon.learn.objectives.pairs import Answers, PairObjective
from echelon.recipe.objective import ObjectiveConfig


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


_LOG_HALF = -math.log(2)


def _log_odds(answers: Answers) -> Tensor:
    """Return log(p / (1 - p)) of the mean log-probabilities; 0 where there is no answer.

    Each form of log(1 - p) is exact on its side of p = 1/2.
    """
    scores = answers.mean_score.where(answers.tokens > 0, _LOG_HALF)
    is_likely = scores > _LOG_HALF
    near, far = scores.where(is_likely, -0.1), scores.where(~is_likely, -1.0)  # whose gradients are finite everywhere
    return scores - torch.where(is_likely, (-near.expm1()).log(), (-far.exp()).log1p())


def build_orpo(config: ObjectiveConfig) -> ORPO:
    """Build the objective from the recipe's section."""
    return ORPO(config.beta)


def build_simpo(config: ObjectiveConfig) -> SimPO:
    """Build the objective from the recipe's section."""
    return SimPO(config.beta, config.gamma, config.label_smoothing, config.sft_weight or 0.0)


def build_cpo(config: ObjectiveConfig) -> CPO:
    """Build the objective from the recipe's section."""
    sft_weight = 1.0 if config.sft_weight is None else config.sft_weight
    return CPO(config.beta, config.loss_name, config.label_smoothing, sft_weight)
