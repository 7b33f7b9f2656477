"""Losses over the logits of tokens that never materialise fp32 logits [tokens, vocabulary].

The head, its arithmetic and the loss run on one chunk of tokens at a time. For a sum, each chunk's gradient is computed
in the forward pass, so that only [tokens, hidden] and [vocabulary, hidden] outlive a chunk, and no matmul runs twice.
For single tokens, whose upstream gradients are not known yet, the backward pass recomputes each chunk. The method is
that of Liger Kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989), in plain PyTorch.

Of cross-entropy the gradient is written by hand; of any other loss autograd derives it (`loss_function.py`). If the
vocabulary is divided over ranks, no rank has all logits of a token: the maximum, the sum of exponentials and the logit
of the label are reduced over the ranks, three numbers per token (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.shards import NO_LABEL
from echelon.learn.model.parts import HeadArithmetic, autocast_dtype
from echelon.planner.model_shape import logits_chunk_tokens

IGNORE = -100


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fp32 sum of cross-entropies, without labels IGNORE. logits [tokens, vocabulary], labels [tokens]."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def token_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, [tokens], fp32, 0 for IGNORE. logits [tokens, vocabulary]."""
    return -F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")


def loss_and_gradient(
    logits: Tensor, labels: Tensor, arithmetic: HeadArithmetic, factor: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return `token_loss_sum` of a head's raw logits, and `factor` times its gradient in their dtype.

    The gradient of a token's loss is its probabilities, less one at the label, times the derivative of the arithmetic.
    Two tensors of the logits' size exist in fp32 at most, three with soft-capping. Compiled, it reads the logits and
    writes the gradient, and keeps nothing of their size in fp32. Logits that are not finite make the result not finite.

    Args:
        logits: [tokens, vocabulary]; to save memory, the caller keeps no reference to them.
        labels: [tokens].
        factor: one number, or one for each token, fp32 [tokens].
    """
    dtype, counts = logits.dtype, labels != IGNORE
    places, factors = labels.where(counts, 0).unsqueeze(-1), (counts * factor).unsqueeze(-1)
    # At the labels everything is computed from few numbers, so that the rest is one pass when it is compiled.
    at_label = arithmetic.apply(logits.gather(-1, places))
    logits = arithmetic.apply(logits)
    total = torch.logsumexp(logits.float(), -1, keepdim=True)
    scores = at_label.float() - total
    gradient = (logits - total).exp_().mul_(arithmetic.differentiate(factors, logits)).to(dtype)
    at_label = scores.expm1() * arithmetic.differentiate(factors, at_label)
    rows = torch.arange(len(labels), device=labels.device)
    # Not scatter_, which on CPUs copies a bf16 tensor to fp32 and back.
    gradient.index_put_((rows, places.squeeze(-1)), at_label.squeeze(-1).to(dtype))
    return (-scores).squeeze(-1).where(counts, 0.0).sum(), gradient


def _find_largest(logits: Tensor, arithmetic: HeadArithmetic) -> Tensor:
    """Return the largest logit of each token, [tokens, 1], fp32."""
    return arithmetic.apply(logits).amax(-1, keepdim=True).float()


def _add_up(logits: Tensor, columns: Tensor, arithmetic: HeadArithmetic, largest: Tensor) -> Tensor:
    """Return the sum of exponentials and the label's logit, 0 if another rank has it, less `largest`: [2, tokens, 1].

    `columns`: the place of each token's label among the logits, [tokens, 1]; outside of them for another rank's.
    """
    is_here = (columns >= 0) & (columns < logits.shape[-1])
    at_label = arithmetic.apply(logits.gather(-1, columns.where(is_here, 0))) - largest
    total = (arithmetic.apply(logits) - largest).exp_().sum(-1, keepdim=True)
    return torch.stack([total, at_label.where(is_here, 0.0)])


def _differentiate(
    logits: Tensor, columns: Tensor, arithmetic: HeadArithmetic, largest: Tensor, total: Tensor, factors: Tensor
) -> Tensor:
    """Return the gradient of the loss of all ranks, given their sum of exponentials; arguments as of `_add_up`."""
    is_here = (columns >= 0) & (columns < logits.shape[-1])
    places, dtype = columns.where(is_here, 0), logits.dtype
    there = arithmetic.apply(logits.gather(-1, places))
    slope = arithmetic.differentiate(factors, there)
    there = (there - largest).exp() / total * slope - slope * is_here
    logits = arithmetic.apply(logits)
    gradient = (logits - largest).exp_().div_(total).mul_(arithmetic.differentiate(factors, logits)).to(dtype)
    rows = torch.arange(len(logits), device=logits.device)
    return gradient.index_put_((rows, places.squeeze(-1)), there.squeeze(-1).to(dtype))


SHARD_PASSES: tuple[Callable[..., Tensor], ...] = (_find_largest, _add_up, _differentiate)
"""The passes over logits around the two all-reduces of a divided vocabulary; each may be compiled. They read logits
and write their gradient, and compiled they keep nothing of their size in fp32."""


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose logits this rank computes.

    Attributes:
        offset: the id of the first one.
        group: the ranks that have the others, with the same number of tokens each.
        passes: `SHARD_PASSES`, or the same compiled.
    """

    offset: int
    group: dist.ProcessGroup
    passes: tuple[Callable[..., Tensor], ...] = SHARD_PASSES

    def scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability of each label, [tokens], fp32, 0 for NO_LABEL. Collective over `group`.

        Args:
            logits: of this rank's tokens, [tokens, part of the vocabulary], without gradient.
            labels: [tokens], ids of the whole vocabulary.
        """
        _, sums = self._reduce(logits, labels, HeadArithmetic())
        return (sums[1] - sums[0].log()).squeeze(-1).where(labels != NO_LABEL, 0.0)

    def _reduce(self, logits: Tensor, labels: Tensor, arithmetic: HeadArithmetic) -> tuple[Tensor, Tensor]:
        """Return the results of `_find_largest` and `_add_up` over all ranks."""
        find_largest, add_up, _ = self.passes
        largest = find_largest(logits, arithmetic)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        sums = add_up(logits, (labels - self.offset).unsqueeze(-1), arithmetic, largest)
        dist.all_reduce(sums, group=self.group)
        return largest, sums

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens of the vocabulary, given those of this rank's. Collective over `group`.

        [tokens, part of the vocabulary] to [tokens, vocabulary]. Every rank must compute the same from the result: the
        gradient of this rank's logits is then its part of the whole one, and nothing is sent for it.
        """
        whole: Tensor = _Gathered.apply(logits, self)  # type: ignore[no-untyped-call]
        return whole

    def loss_and_gradient(
        self, logits: Tensor, labels: Tensor, arithmetic: HeadArithmetic, factor: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of all tokens, equal on every rank, and its gradient for this rank's logits. Collective.

        See the function `loss_and_gradient`; the logits are [tokens, part of the vocabulary].
        """
        largest, sums = self._reduce(logits, labels, arithmetic)
        counts, columns = labels != NO_LABEL, (labels - self.offset).unsqueeze(-1)
        factors = (counts * factor).unsqueeze(-1)
        gradient = self.passes[-1](logits, columns, arithmetic, largest, sums[0], factors)
        return (sums[0].log() - sums[1]).squeeze(-1).where(counts, 0.0).sum(), gradient


LossAndGradient = Callable[[Tensor, Tensor, HeadArithmetic, float | Tensor], tuple[Tensor, Tensor]]


class ChunkLoss(Protocol):
    """A loss that is a sum over tokens, of which `targets[piece]` has what belongs to the tokens of a chunk."""

    @property
    def differentiate(self) -> Callable[[Tensor, Any, HeadArithmetic, float], tuple[Tensor, Tensor]]:
        """Computes the loss from the head's raw logits, and a factor times its gradient: see `loss_and_gradient`."""

    def evaluate(self, logits: Tensor, targets: Any) -> Tensor:
        """Compute the loss from the model's logits."""


@dataclass(frozen=True)
class _CrossEntropy:
    differentiate: LossAndGradient
    vocabulary: VocabularyShard | None

    def evaluate(self, logits: Tensor, targets: Tensor) -> Tensor:
        return -_scores(logits, targets, self.vocabulary).sum()


def chunked_loss_sum(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arithmetic: HeadArithmetic,
    of_chunk: LossAndGradient = loss_and_gradient,
    vocabulary: VocabularyShard | None = None,
) -> Tensor:
    """Compute the sum of token cross-entropies from the last hidden states.

    Args:
        hidden: [batch, seq, hidden], after the final norm.
        labels: [batch, seq], already shifted, IGNORE if there is no target.
        weight: the head's weight, [vocabulary, hidden]; bias: [vocabulary] or None.
        arithmetic: the family's scaling and soft-capping of the logits.
        of_chunk: `loss_and_gradient`, or the same compiled.
        vocabulary: the part of the vocabulary that weight and bias are of; None: all of it. With a part, this is
            collective over its group, and the gradient of `hidden` is the part that this rank's tokens contribute.

    Returns:
        A scalar in fp32. Under autocast the head's matmul runs in the autocast dtype.
    """
    loss = _CrossEntropy(of_chunk if vocabulary is None else vocabulary.loss_and_gradient, vocabulary)
    chunk = logits_chunk_tokens(len(weight), hidden.device.type, weight.requires_grad)
    return sum_chunks(hidden, labels.flatten(), weight, bias, arithmetic, loss, chunk)


def sum_chunks(
    hidden: Tensor,
    targets: Any,
    weight: Tensor,
    bias: Tensor | None,
    arithmetic: HeadArithmetic,
    loss: ChunkLoss,
    chunk: int,
) -> Tensor:
    """Add up a loss over chunks of at most `chunk` tokens: an fp32 scalar. See `chunked_loss_sum`."""
    rows = hidden.flatten(0, -2)
    if not torch.is_grad_enabled():  # needs_input_grad of a Function is True even then
        rows, weight, bias = rows.detach(), weight.detach(), None if bias is None else bias.detach()
    dtype = autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ChunkedLoss.apply(rows, targets, weight, bias, arithmetic, dtype, loss, chunk)  # type: ignore[no-any-return,no-untyped-call]


def chunked_log_probabilities(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arithmetic: HeadArithmetic,
    vocabulary: VocabularyShard | None = None,
) -> Tensor:
    """Return the log-probability of each label, [batch, seq], fp32, 0 for IGNORE. Arguments: see `chunked_loss_sum`."""
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    dtype = autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        scores: Tensor = _ChunkedLogProbabilities.apply(rows, targets, weight, bias, arithmetic, dtype, vocabulary)  # type: ignore[no-untyped-call]
    return scores.view_as(labels)


def gradient_factor(dtype: torch.dtype, num_rows: int) -> float:
    """Return the factor on a chunk's gradients before the loss scale is known: a power of two, 1 except for fp16.

    In fp16 the head's gradient, a sum over rows, could overflow at any loss scale. The factor times the number of rows
    is at most 1024, so the sum cannot overflow unless a hidden value exceeds 63. With fewer rows the factor is larger,
    to keep small gradients from underflowing.
    """
    return 1.0 if dtype != torch.float16 else 2.0 ** (10 - max(0, num_rows - 1).bit_length())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        targets: Any,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: HeadArithmetic,
        dtype: torch.dtype,
        loss: ChunkLoss,
        chunk: int,
    ) -> Tensor:
        # A frozen head needs no gradient.
        wants_gradient, wants_head = any(ctx.needs_input_grad[:4]), any(ctx.needs_input_grad[2:4])
        head = [tensor.detach().to(dtype) for tensor in (weight, bias) if tensor is not None]
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        row_gradient = torch.empty_like(rows) if wants_gradient else None
        head_gradient = [torch.zeros_like(weight, dtype=torch.float32) for weight in head] if wants_head else []
        factor = gradient_factor(dtype, min(chunk, rows.shape[0]))
        for piece in _pieces(rows, chunk):
            inputs = rows[piece].detach().to(dtype)
            if row_gradient is None:
                total += loss.evaluate(arithmetic.apply(F.linear(inputs, *head)), targets[piece])
                continue
            value, gradient = loss.differentiate(F.linear(inputs, *head), targets[piece], arithmetic, factor)
            total += value
            row_gradient[piece] = gradient @ head[0]
            _add_head_gradient(head_gradient, gradient, inputs)
            del gradient  # before the logits of the next chunk
        ctx.gradients, ctx.factor = (row_gradient, head_gradient), factor
        ctx.dtypes = [tensor.dtype for tensor in (weight, bias) if tensor is not None][: len(head_gradient)]
        return total

    @staticmethod
    @override
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        row_gradient, head_gradient = ctx.gradients
        # A pipeline may ask for the gradient of the rows first, and keeps the graph for that of the head.
        if torch._C._autograd._get_current_graph_task_keep_graph():
            row_gradient, head_gradient = row_gradient.clone(), [gradient.clone() for gradient in head_gradient]
        else:
            ctx.gradients = None
        remaining = upstream[0] / ctx.factor
        rows = row_gradient.mul_(remaining.to(row_gradient.dtype))
        head: list[Tensor | None] = [
            gradient.mul_(remaining.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(head_gradient, ctx.dtypes, strict=True)
        ]
        weight, bias, *_ = [*head, None, None]
        return rows, None, weight, bias, None, None, None, None


def _scores(logits: Tensor, labels: Tensor, vocabulary: VocabularyShard | None) -> Tensor:
    """The log-probability of each label, [tokens], of logits for all of the vocabulary or a part."""
    return token_log_probabilities(logits, labels) if vocabulary is None else vocabulary.scores(logits, labels)


def _add_head_gradient(totals: list[Tensor], gradient: Tensor, inputs: Tensor) -> None:
    """Add the head's gradients of a chunk to `totals`, given the chunk's gradient of the raw logits.

    `totals` is empty for a frozen head. The sums are fp32, so that many chunks lose no precision.
    """
    for weight in totals[:1]:
        add_product(weight, gradient.T, inputs)
    for bias in totals[1:]:
        bias.add_(gradient.sum(0, dtype=bias.dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix left @ right to `total`, which is fp32, in place.

    The product itself adds, on GPUs in any dtype. On a CPU one in bf16 or fp16 is a temporary matrix of that dtype.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif _adds_to_fp32(left.device, left.dtype, type(left)):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


@lru_cache
def _adds_to_fp32(device: torch.device, dtype: torch.dtype, kind: type[Tensor]) -> bool:
    """Whether products of this dtype can be added to fp32 matrices there: by a try, as no list of torch says it.

    A fake tensor may take what a tensor refuses, so each kind of tensor has its own answer.
    """
    factor = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # TypeError: a fake tensor in torch 2.11
        return False
    return True


class _ChunkedLogProbabilities(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: HeadArithmetic,
        dtype: torch.dtype,
        vocabulary: VocabularyShard | None,
    ) -> Tensor:
        head = [tensor.to(dtype) for tensor in (weight, bias) if tensor is not None]
        scores = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        ctx.chunk = logits_chunk_tokens(len(weight), rows.device.type, ctx.needs_input_grad[2])
        for piece in _pieces(rows, ctx.chunk):
            inputs = rows[piece].to(dtype)
            scores[piece] = _scores(arithmetic.apply(F.linear(inputs, *head)), targets[piece], vocabulary)
        ctx.save_for_backward(rows, targets, weight, bias)
        ctx.arithmetic, ctx.dtype, ctx.vocabulary = arithmetic, dtype, vocabulary
        return scores

    @staticmethod
    @override
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, targets, weight, bias = ctx.saved_tensors
        parameters = [tensor for tensor in (weight, bias) if tensor is not None]
        head = [tensor.detach().to(ctx.dtype) for tensor in parameters]
        wants_head = any(ctx.needs_input_grad[2:4])
        of_chunk = loss_and_gradient if ctx.vocabulary is None else ctx.vocabulary.loss_and_gradient
        totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in head] if wants_head else []
        row_gradient = torch.empty_like(rows)
        for piece in _pieces(rows, ctx.chunk):
            inputs = rows[piece].detach().to(ctx.dtype)
            weights = -upstream[0][piece]  # the loss is the negative sum of what is returned
            _, gradient = of_chunk(F.linear(inputs, *head), targets[piece], ctx.arithmetic, weights)
            row_gradient[piece] = gradient @ head[0]
            _add_head_gradient(totals, gradient, inputs)
            del gradient
        gradients: list[Tensor | None] = [
            total.to(tensor.dtype) for total, tensor in zip(totals, parameters[: len(totals)], strict=True)
        ]
        weight_gradient, bias_gradient, *_ = [*gradients, None, None]
        return row_gradient, None, weight_gradient, bias_gradient, None, None, None


def _pieces(rows: Tensor, chunk: int) -> Iterator[slice]:
    """Split rows [tokens, hidden] into chunks of so many tokens, whose logits fit the memory limit."""
    return (slice(start, start + chunk) for start in range(0, rows.shape[0], chunk))


class _Gathered(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, vocabulary: VocabularyShard) -> Tensor:
        ctx.part = slice(vocabulary.offset, vocabulary.offset + logits.shape[-1])
        parts = [torch.empty_like(logits) for _ in range(vocabulary.group.size())]
        dist.all_gather(parts, logits.contiguous(), group=vocabulary.group)
        return torch.cat(parts, -1)

    @staticmethod
    @override
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0][:, ctx.part], None
