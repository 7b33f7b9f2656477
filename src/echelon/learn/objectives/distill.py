"""Distillation: the model's predictions are brought close to those of a teacher, at every labelled token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.data.taught import SCORES, TOKENS
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.loss_function import LossFn
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import DecoderOutputs
from echelon.recipe.objective import ObjectiveConfig

Divergence = Literal["forward", "reverse", "jsd"]

NOTHING = -1e4
"""The log-probability of what is impossible: a number, because infinities have no differences."""


def top_scores(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the values of `TOKENS`, the likeliest first, and of `SCORES`, [n, k] and [n, k + 1].

    logits: [n, vocabulary], fp32.
    """
    total = logits.logsumexp(-1, keepdim=True)
    scores, tokens = logits.topk(min(top_k, logits.shape[-1]), -1)
    return tokens, torch.cat([scores - total, _score_of_others(logits, tokens, total)], -1)


def _score_of_others(logits: Tensor, tokens: Tensor, total: Tensor) -> Tensor:
    """Return the log-probability of all tokens but these, [n, 1]; not 1 - sum, which loses a small remainder."""
    others = logits.scatter(-1, tokens, NOTHING).logsumexp(-1, keepdim=True)
    return (others - total).clamp(min=NOTHING)


@dataclass(frozen=True)
class _Predictions:
    """The log-probabilities of model and teacher for the same outcomes, [n, outcomes], and what both think likeliest.

    Outcomes are tokens; with a teacher's k likeliest, these and one more, which is all other tokens.
    """

    model: Tensor
    teacher: Tensor
    favourites: tuple[Tensor, Tensor]
    """The likeliest token of each, [n]."""


def _read(logits: Tensor, extra: Mapping[str, Tensor], temperature: float) -> _Predictions:
    logits = logits / temperature
    if TOKENS in extra:
        tokens = extra[TOKENS].long()
        total = logits.logsumexp(-1, keepdim=True)
        model = torch.cat([logits.gather(-1, tokens) - total, _score_of_others(logits, tokens, total)], -1)
        return _Predictions(model, extra[SCORES].float(), (logits.argmax(-1), tokens[:, 0]))
    teacher = extra["teacher_logits"] / temperature
    # Vocabularies of one tokenizer may be padded differently; no text has the ids beyond the smaller one.
    width = min(logits.shape[-1], teacher.shape[-1])
    both = [scores[:, :width].log_softmax(-1) for scores in (logits, teacher)]
    return _Predictions(both[0], both[1], (both[0].argmax(-1), both[1].argmax(-1)))


def _kl(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) of log-probabilities [n, outcomes]: [n]."""
    return (left.exp() * (left - right)).sum(-1)


@dataclass(frozen=True)
class DistillationLoss:
    """The divergence of teacher P and model Q at each labelled token, a `LossFn`.

    `forward` is KL(P || Q), `reverse` KL(Q || P), and `jsd` the generalised Jensen-Shannon divergence, with the mixture
    M = beta P + (1 - beta) Q (Agarwal et al. 2024, arXiv:2306.13649, equation 1):

        beta KL(P || M) + (1 - beta) KL(Q || M)

    Both are divided by `temperature` before the softmax; the loss is not multiplied by its square, as Hinton et al.
    2015 do. `sft_weight` adds the cross-entropy of the labels.

    If `extra` has the k likeliest tokens of the teacher, P and Q are over k + 1 outcomes: these tokens, and any other
    token. Such a divergence is never larger than that over all tokens, and equal to it with k = vocabulary; without the
    last outcome the model would be taught that other tokens are impossible (the "ghost token" of Anshumann et al. 2025,
    arXiv:2503.16870).
    """

    loss: Divergence = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    sft_weight: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss: see `LossFn`. `extra` has `TOKENS` and `SCORES`, or `teacher_logits`."""
        read = _read(logits, extra, self.temperature)
        total = (self._diverge(read.model, read.teacher) * (labels != IGNORE)).sum()
        if self.sft_weight:
            total = total + self.sft_weight * F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return total

    def _diverge(self, model: Tensor, teacher: Tensor) -> Tensor:
        if self.loss == "forward":
            return _kl(teacher, model)
        if self.loss == "reverse":
            return _kl(model, teacher)
        beta = torch.tensor(self.beta, device=model.device)
        mixture = torch.logaddexp(teacher + beta.log(), model + (-beta).log1p())
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(model, mixture)


def entropy(logits: Tensor, labels: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the entropies of the model's predictions of labelled tokens, over the whole vocabulary."""
    scores = logits.log_softmax(-1)
    return -((scores.exp() * scores).sum(-1) * (labels != IGNORE)).sum()


def agreement(logits: Tensor, labels: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """Return the number of labelled tokens for which model and teacher think the same token likeliest."""
    ours, theirs = _read(logits, extra, 1.0).favourites
    return ((ours == theirs) & (labels != IGNORE)).sum().float()


@dataclass(frozen=True)
class Distill(Objective):
    """Learning from a teacher's predictions: see `DistillationLoss`.

    A microbatch has the teacher's likeliest tokens in `extra`; else the module has the teacher as its reference.
    """

    function: DistillationLoss = DistillationLoss()

    measures = ("cross_entropy", "kl", "entropy", "agreement")

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss of the labelled tokens."""
        return self._sum_up([self.function], outputs, batch)[0]

    @override
    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, cross-entropy, KL(teacher || model), entropy, and number of agreements."""
        loss, *more = self._sum_up([self.function, *self._measured], outputs, batch)
        return torch.stack([loss, outputs.token_loss_sum(batch.labels), *more])

    @property
    def _measured(self) -> Sequence[LossFn]:
        return DistillationLoss(temperature=self.function.temperature), entropy, agreement

    def _sum_up(self, functions: Sequence[LossFn], outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        if TOKENS not in batch.extra:
            return outputs.compare_with_reference(functions, batch.labels, batch.extra)
        return torch.stack([outputs.logits_loss_sum(function, batch.labels, batch.extra) for function in functions])


def build_distill(config: ObjectiveConfig) -> Distill:
    """Build the objective from the recipe's section."""
    loss: Divergence = config.loss_name  # type: ignore[assignment]
    return Distill(DistillationLoss(loss, config.beta, config.temperature, config.sft_weight or 0.0))
