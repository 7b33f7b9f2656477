"""A loss as one function of logits; its gradient and its sum over chunks of tokens are derived by autograd."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.ground.errors import ConfigError
from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.objectives.loss import VocabularyShard, sum_chunks
from echelon.planner.model_shape import FUNCTION_LOGITS, logits_chunk_tokens

LossFn = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""The summed loss of a chunk of tokens, a differentiable function of its logits:
(logits [n, vocabulary] fp32, labels [n], extra: name -> [n, ...]) -> scalar.

`labels` is IGNORE where there is no target; such a token must add 0. `extra` is what `Microbatch.extra` has of each
token. Under tensor parallelism every rank calls it with the same logits, so a random number must be the same on all.
"""


def chunked_function_sum(
    function: LossFn,
    hidden: Tensor,
    labels: Tensor,
    extra: Mapping[str, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    arithmetic: HeadArithmetic,
    vocabulary: VocabularyShard | None = None,
    num_logits: int = FUNCTION_LOGITS,
) -> Tensor:
    """Compute the sum of a loss function over all tokens from the last hidden states: an fp32 scalar.

    With a part of the vocabulary, the ranks of its group gather the logits of each chunk; each keeps the gradient of
    its part. Raises ConfigError: see `function_loss_sum`.

    Args:
        extra: name -> [batch * seq, ...]. For the other arguments see `chunked_loss_sum`.
        num_logits: tensors of the logits' size that autograd keeps, in units of those of the derivative by hand.
    """
    size = len(weight) if vocabulary is None else len(weight) * vocabulary.group.size()
    chunk = logits_chunk_tokens(num_logits * size, hidden.device.type, weight.requires_grad)
    targets, loss = _Targets(labels.flatten(), extra), _FunctionLoss(function, vocabulary)
    return sum_chunks(hidden, targets, weight, bias, arithmetic, loss, chunk)


@dataclass(frozen=True)
class _Targets:
    labels: Tensor
    extra: Mapping[str, Tensor]

    def __getitem__(self, piece: slice) -> "_Targets":
        return _Targets(self.labels[piece], {name: value[piece] for name, value in self.extra.items()})


@dataclass(frozen=True)
class _FunctionLoss:
    """A LossFn, and its gradient by autograd."""

    function: LossFn
    vocabulary: VocabularyShard | None

    def evaluate(self, logits: Tensor, targets: _Targets) -> Tensor:
        if self.vocabulary is not None:
            logits = self.vocabulary.gather(logits)
        return function_loss_sum(self.function, logits, targets.labels, targets.extra)

    def differentiate(
        self, logits: Tensor, targets: _Targets, arithmetic: HeadArithmetic, factor: float
    ) -> tuple[Tensor, Tensor]:
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.evaluate(arithmetic.apply(logits), targets)
        [gradient] = torch.autograd.grad(loss, [logits], torch.full_like(loss, factor))
        return loss.detach(), gradient


def function_loss_sum(function: LossFn, logits: Tensor, labels: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a function, checked. logits [tokens, vocabulary], labels [tokens], extra [tokens, ...].

    Raises ConfigError if it does not return a scalar that depends on the logits, or reads an extra that is not there.
    """
    try:
        loss = function(logits.float(), labels, extra)
    except KeyError as error:
        if error.args[:1] and error.args[0] in extra:
            raise
        raise ConfigError(
            f"the loss {name_of(function)} reads {error}, and the batch has extra={sorted(extra)}; give it in "
            "Microbatch.extra of every batch, those of the evaluation too."
        ) from error
    if not isinstance(loss, Tensor) or loss.dim():
        result = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(
            f"the loss {name_of(function)} returned {result}, and a loss is one number, the sum over all tokens of its "
            "logits; end it with .sum()."
        )
    if logits.requires_grad and not loss.requires_grad:
        raise ConfigError(
            f"the loss {name_of(function)} does not depend on its logits, so it has no gradient; compute it from them, "
            "without detach() or torch.no_grad()."
        )
    return loss


def name_of(function: Any) -> str:
    """Return `module:name` of a loss function, with or without options, for messages."""
    inner = getattr(function, "func", function)  # of a functools.partial
    return f"{getattr(inner, '__module__', '')}:{getattr(inner, '__name__', type(inner).__name__)}"
