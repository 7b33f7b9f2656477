"""Policy gradients on the model's own answers, with advantages relative to other answers to the same prompt."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import MeasuredObjective, sequence_weights
from echelon.learn.objectives.outputs import DecoderOutputs
from echelon.recipe.objective import ObjectiveConfig


@dataclass(frozen=True)
class GRPO(MeasuredObjective):
    """Group relative policy optimization (GRPO, Shao et al. 2024, arXiv:2402.03300, equation 3) and its variants.

    With the ratio r = p(token) / p_old(token) and the advantage A of the answer, the loss of a token is

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_weight (q - log q - 1),   q = p_reference / p

    whose last term is an estimate of the KL divergence from the reference that is never negative (Schulman 2020,
    "Approximating KL divergence", k3). With `kl_unbiased` this term is multiplied by r, which makes the expectation of
    its gradient that of the divergence (DeepSeek-V3.2, arXiv:2512.02556).

    ratio: `token`, or `sequence` for the geometric mean of the ratios of an answer (GSPO, arXiv:2507.18071).
    normalize: what losses are divided by. `sequence`: the mean over an answer's tokens, then over answers (GRPO);
        `token`: the number of tokens of all answers (DAPO, arXiv:2503.14476); `constant`: answers times `max_tokens`,
        so that length does not change the weight of a token (Dr. GRPO, arXiv:2503.20783).

    A microbatch has in `extra` the `advantages`, [batch], [batch, 1] or at each label [batch, seq], and the
    `old_log_probabilities` of the labels, [batch, seq]. Without the latter the ratio is 1 and the gradient is that of
    A log p. With `importance_cap`, the loss of a token is multiplied by min(p_old / p_sampled, importance_cap), of
    `sampled_log_probabilities`, [batch, seq]: truncated importance sampling, for a sampler whose probabilities differ
    from those of the model in training.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: Literal["token", "sequence"] = "token"
    normalize: Literal["sequence", "token", "constant"] = "sequence"
    kl_weight: float = 0.0
    kl_unbiased: bool = False
    needs_reference: bool = False
    max_tokens: int = 1
    """Tokens of an answer at most: the divisor of `constant`."""
    temperature: float = 1.0
    """Of the probabilities, as the answers were sampled."""
    importance_cap: float | None = None

    unit = "answers"
    step_measures = ("clipped_low", "clipped_high", "kl")

    @override
    def count(self, batch: Microbatch) -> Tensor:
        """Count tokens, answers, or answers times `max_tokens`, as `normalize` says."""
        labelled = batch.labels != IGNORE
        if self.normalize == "token":
            return labelled.sum()
        return labelled.any(1).sum() * (self.max_tokens if self.normalize == "constant" else 1)

    @override
    def token_weights(self, batch: Microbatch) -> Tensor:
        """Distribute the count of an answer evenly over its tokens."""
        if self.normalize == "token":
            return super().token_weights(batch)
        weight = self.max_tokens if self.normalize == "constant" else 1
        return weight * sequence_weights(batch.labels)

    @override
    def step_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, and over the same tokens how many each side of the clip held, and the summed KL."""
        labelled = (batch.labels != IGNORE).float()
        lengths = labelled.sum(1, keepdim=True).clamp(min=1)
        scores = outputs.log_probabilities(batch.labels, self.temperature)
        old = batch.extra.get("old_log_probabilities", scores.detach())
        # The rehearsal of a step has no answers, and so no advantages.
        advantages = batch.extra.get("advantages", labelled.new_zeros(len(labelled))).float()
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]

        growth = (scores - old) * labelled
        if self.ratio == "sequence":
            growth = growth.sum(1, keepdim=True) / lengths
        ratio = growth.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        losses = -torch.minimum(ratio * advantages, clipped) * labelled
        if self.importance_cap is not None and "sampled_log_probabilities" in batch.extra:
            gap = (old.detach() - batch.extra["sampled_log_probabilities"]) * labelled
            losses = losses * gap.exp().clamp(max=self.importance_cap)
        divergence = self._divergence(outputs, batch, scores) * labelled
        losses = losses + self.kl_weight * (divergence * ratio if self.kl_unbiased else divergence)

        if self.normalize == "sequence":
            losses = losses / lengths
        is_clipped = (clipped < ratio * advantages).float() * labelled
        low = (is_clipped * (advantages < 0)).sum()
        return torch.stack([losses.sum(), low, is_clipped.sum() - low, divergence.detach().sum()])

    def _divergence(self, outputs: DecoderOutputs, batch: Microbatch, scores: Tensor) -> Tensor:
        """Estimate the KL divergence from the reference at each token, [batch, seq]; 0 if it has no weight."""
        if self.kl_weight == 0:
            return torch.zeros_like(scores)
        gap = outputs.reference_log_probabilities(batch.labels, self.temperature) - scores
        return gap.exp() - gap - 1


def advantages_of(rewards: Tensor, scale: Literal["normalized", "centered", "leave_one_out"] = "normalized") -> Tensor:
    """Return how much better each answer of a group is than the others, of the same shape.

    Args:
        rewards: [groups, answers], NaN where an answer has none; its advantage is 0, and the others ignore it.
        scale: `normalized`: the reward less the group's mean, over its standard deviation (GRPO); `centered`: without
            the division (Dr. GRPO, arXiv:2503.20783); `leave_one_out`: less the mean of the others (RLOO,
            arXiv:2402.14740).
    """
    centred, count = _centre(rewards)
    if scale == "leave_one_out":
        return centred * count / (count - 1).clamp(min=1)
    if scale == "centered":
        return centred
    return centred / (spread_of(rewards) + 1e-4)


def spread_of(rewards: Tensor) -> Tensor:
    """Return the standard deviation, with the divisor n - 1, of the rewards that each group has, [groups, 1].

    rewards: [groups, answers], NaN where an answer has none. It is 0 for a group with fewer than two.
    """
    centred, count = _centre(rewards)
    return (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def are_uniform(rewards: Tensor) -> Tensor:
    """Return which groups have no two rewards that differ, bool [groups, 1]. `rewards`: as in `spread_of`."""
    has_reward = ~rewards.isnan()
    lowest = rewards.where(has_reward, math.inf).amin(1, keepdim=True)
    return lowest >= rewards.where(has_reward, -math.inf).amax(1, keepdim=True)


def _centre(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rewards less the mean of their group, 0 where there is none, and how many each group has."""
    has_reward = ~rewards.isnan()
    count, values = has_reward.sum(1, keepdim=True), rewards.nan_to_num(0.0)
    return (values - values.sum(1, keepdim=True) / count.clamp(min=1)) * has_reward, count


def build_grpo(config: ObjectiveConfig) -> GRPO:
    """Build the objective from the recipe's section."""
    return GRPO(
        *config.clip,
        config.ratio,
        config.normalize,
        config.kl_weight,
        config.kl_unbiased,
        needs_reference=config.kl_weight > 0,
    )
