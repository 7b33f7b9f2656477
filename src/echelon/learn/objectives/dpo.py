"""Direct preference optimization, and its variants."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.learn.objectives.pairs import Answers, PairObjective
from echelon.recipe.objective import ObjectiveConfig


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


PairLoss = Callable[[Answers, Answers, float, float], Tensor]
"""The loss of each pair: (chosen, rejected, beta, label_smoothing) to [batch, pairs]."""


def _margin(chosen: Answers, rejected: Answers) -> Tensor:
    return chosen.growth - rejected.growth


def smoothed_sigmoid(rewards: Tensor, wrong: float) -> Tensor:
    """Return -(1 - w) log sigmoid(r) - w log sigmoid(-r) for the difference r of the rewards and `wrong` w."""
    return -(1 - wrong) * F.logsigmoid(rewards) - wrong * F.logsigmoid(-rewards)


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


def build_dpo(config: ObjectiveConfig) -> DPO:
    """Build the objective from the recipe's section."""
    return DPO(config.beta, config.loss_name, config.label_smoothing, config.sft_weight or 0.0)
