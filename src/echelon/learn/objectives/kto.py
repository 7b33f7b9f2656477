"""Kahneman-Tversky optimization: single answers, each judged good or bad."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.data.loader import Microbatch
from echelon.learn.data.shards import GOOD
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective, sequence_weights
from echelon.learn.objectives.outputs import DecoderOutputs, RunFn
from echelon.recipe.objective import ObjectiveConfig

KL = "kl"
"""The mean growth of answers to the prompts of others, in `Microbatch.extra`: an estimate of a KL divergence."""
GOOD_SHARE = "good_share"
"""The share of good answers, in `Microbatch.extra`."""


@dataclass(frozen=True)
class KTO(Objective):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, equation 7), on single answers.

    The growth g of an answer is its log-probability less that under the reference, summed over its tokens. The loss of
    a good answer is desirable_weight (1 - sigmoid(beta (g - z))), that of a bad one undesirable_weight
    (1 - sigmoid(beta (z - g))). z is the mean growth of the batch's answers, each behind the prompt of the next
    sequence (`Microbatch.mismatched`), at least 0 and without gradient. With `loss` apo_zero_unpaired z is 0
    (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7, on single answers). TRL's KTOTrainer takes z over a
    microbatch of every rank; here it is that of the whole batch of a step.

    The reward of an answer is beta g. It is right for a good answer above beta z, and for a bad one below. A sequence
    has one answer, which counts if any of its tokens has a label.
    """

    beta: float
    loss: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    needs_reference = True
    unit = "answers"
    measures = ("reward_accuracy", "reward_margin")

    @property
    @override
    def batch_means(self) -> tuple[str, ...]:
        return (GOOD_SHARE, KL) if self.loss == "kto" else (GOOD_SHARE,)

    @override
    def batch_sums(self, batch: Microbatch, run: RunFn) -> Tensor:
        exist, good = _answers(batch)
        sums = [(good * exist).sum()]
        if self.loss == "kto":
            if batch.mismatched is None:
                raise ConfigError(
                    "the loss KTO needs answers that were given to other prompts, and this batch has none; give them "
                    "in Microbatch.mismatched (data.source), or use objective.loss=apo_zero_unpaired."
                )
            sums.append((run(batch.mismatched, _growth) * exist).sum())
        return torch.stack(sums)

    @override
    def count(self, batch: Microbatch) -> Tensor:
        """Count the answers with a label."""
        return _answers(batch)[0].sum()

    @override
    def token_weights(self, batch: Microbatch) -> Tensor:
        """Return equal weights for the labelled tokens of an answer, which add up to 1."""
        return sequence_weights(batch.labels)

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss of the answers."""
        return self._add_up(_growth(outputs, batch), batch)

    @override
    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, the number of answers on their side of the baseline, and what adds up to the margin.

        The margin is the mean reward of the good answers less that of the bad ones; NaN if there are none of one kind.
        """
        exist, good = _answers(batch)
        growth, share, baseline = _growth(outputs, batch), batch.extra[GOOD_SHARE], self._baseline(batch)
        right = torch.where(good, growth > baseline, growth < baseline) & exist
        rewards = self.beta * growth * torch.where(good, 1 / share, -1 / (1 - share))
        margins = rewards.where(exist, 0.0).where((share > 0) & (share < 1), torch.nan)
        return torch.stack([self._add_up(growth, batch), right.sum().float(), margins.sum()])

    def _add_up(self, growth: Tensor, batch: Microbatch) -> Tensor:
        exist, good = _answers(batch)
        above = self.beta * (growth - self._baseline(batch))
        losses = torch.where(
            good, self.desirable_weight * F.sigmoid(-above), self.undesirable_weight * F.sigmoid(above)
        )
        return (losses * exist).sum()

    def _baseline(self, batch: Microbatch) -> Tensor:
        """Return z for each sequence, [batch]."""
        return (
            batch.extra[KL].clamp(min=0)
            if self.loss == "kto"
            else torch.zeros(len(batch.labels), device=batch.labels.device)
        )


def _answers(batch: Microbatch) -> tuple[Tensor, Tensor]:
    """Return which sequences have an answer, and which answers are good: boolean [batch] each."""
    if GOOD not in batch.extra:
        raise ConfigError(
            "the loss KTO trains on judged answers, and this batch does not say which of them are good; give "
            f"Microbatch.extra[{GOOD!r}], one boolean per sequence (data.source), or records with a label."
        )
    return (batch.labels != IGNORE).any(1), batch.extra[GOOD].bool()


def _growth(outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
    """Return the log-probability of each answer less that under the reference, [batch], fp32."""
    reference = outputs.reference_log_probabilities(batch.labels).sum(1)
    return outputs.log_probabilities(batch.labels).sum(1) - reference


def build_kto(config: ObjectiveConfig) -> KTO:
    """Build the objective from the recipe's section."""
    return KTO(config.beta, config.loss_name, config.desirable_weight, config.undesirable_weight)
