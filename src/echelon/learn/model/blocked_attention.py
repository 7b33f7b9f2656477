"""Causal attention on a CPU, as matrix products over blocks of queries.

torch's attention kernel for CPUs multiplies small tiles. Large products are faster in bf16, and in fp32 if a compiler
fuses what is between them. A block of queries needs only the keys up to its end, half of all on average.

There are two forms. One is an operation of its own: its backward pass computes the probabilities again, so that memory
grows with the length of sequences, as with torch's kernel. Under `torch.compile` short sequences of a constant length
take the other, plain products and softmaxes: inductor fuses all between the products, which takes a third less time,
and keeps the probabilities for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from typing_extensions import override

# Queries per block up to this length, and beyond it: fewer waste less of the triangle, more make larger products.
_SHORT, _BLOCKS = 1024, (128, 256)
# The longest sequence whose probabilities are kept: there they are about as large as what else a layer keeps.
_KEPT = 1024


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(scale * query @ key^T) @ value, where a position attends to itself and earlier ones.

    Results are rounded to the dtype of the inputs: scores after the largest of their row is subtracted, so that those
    that matter lose little; gradients of keys and values after they are summed in fp32. In a compiled graph of short
    sequences of a constant length, scores are rounded as they are, as in the eager attention of `transformers`.

    Args:
        query: [batch, query heads, seq, width].
        key: [batch, heads, seq, width], with a number of heads that divides the query heads.
        value: as `key`.
        scale: positive.
        mask: [batch or 1, 1, seq, seq], bool, where further positions are False; each position attends to itself.

    Returns:
        [batch, seq, query heads, width].
    """
    if is_traced(query.shape[2]):
        return _trace(query, key, value, scale, mask)
    output: Tensor = _attend(query, key, value, scale, mask)[0]
    return output


def is_traced(length: int) -> bool:
    """Whether a compiler that is tracing this call gets plain products and softmaxes, which it fuses."""
    return torch.compiler.is_compiling() and bool(has_static_value(length)) and length <= _KEPT


def _trace(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Compute the same with operations that a compiler can fuse. The loop becomes part of the graph."""
    batch, heads, length, width = query.shape
    keys, values = _Prefixes.apply(_flat(key)), _Prefixes.apply(_flat(value))  # type: ignore[no-untyped-call]
    results = []
    for number, block in enumerate(_blocks(length)):
        scores = _block_of(query, key, block) @ keys[number].transpose(1, 2)
        by_head = scores.view(batch, heads, -1, block.stop)
        rows, columns = torch.arange(block.start, block.stop), torch.arange(block.stop)
        seen = rows[:, None] >= columns if mask is None else mask[:, :, block, : block.stop]
        by_head = torch.where(seen, by_head * scale, torch.finfo(scores.dtype).min)
        probabilities = torch.softmax(by_head, -1, dtype=torch.float32).to(query.dtype).view_as(scores)
        results.append((probabilities @ values[number]).view(batch, heads, -1, width))
    return torch.cat(results, 2).transpose(1, 2).contiguous()


class _Prefixes(torch.autograd.Function):
    """All rows up to the end of each block. [batch, rows, width] each.

    Autograd would pad the gradient of each prefix with zeros and add them all, which inductor computes one element at
    a time. Here each block of rows gets the sum of its gradients, in fp32.
    """

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(rows[:, : block.stop] for block in _blocks(rows.shape[1]))

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        dtype, parts = gradients[-1].dtype, []
        for number, block in enumerate(_blocks(gradients[-1].shape[1])):
            grads = [gradient[:, block].float() for gradient in gradients[number:]]
            parts.append(sum(grads[1:], grads[0]).to(dtype))
        return torch.cat(parts, 1)


@torch.library.custom_op("echelon::blocked_attention", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output, and the largest score of each query, [batch, query heads, seq, 1]."""
    batch, heads, length, width = query.shape
    keys, values = _flat(key), _flat(value)
    output, largest = query.new_empty(batch, length, heads, width), query.new_empty(batch, heads, length, 1)
    with torch.autocast(query.device.type, enabled=False):
        for block in _blocks(length):
            queries = _block_of(query, key, block)
            scores = queries @ keys[:, : block.stop].transpose(1, 2)
            peaks = _hide(scores, query, block, mask).amax(-1, keepdim=True).mul_(scale)
            largest[:, :, block] = peaks.view(batch, heads, -1, 1)
            del scores  # two blocks of scores at once suffice, here and in the next turn
            probabilities = _probabilities(queries, keys, peaks, query, block, scale, mask)
            results = probabilities @ values[:, : block.stop]
            output[:, block] = results.view(batch, heads, -1, width).transpose(1, 2)
            del probabilities
    return output, largest


@_attend.register_fake
def _shapes(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, heads, width), query.new_empty(batch, heads, length, 1)


@torch.library.custom_op("echelon::blocked_attention_backward", mutates_args=())
def _differentiate(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, largest: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    batch, heads, length, width = query.shape
    keys, values = _flat(key), _flat(value)
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    # [heads, width, seq]: a product of a few transposed queries copies less than one of transposed probabilities
    shape = (len(keys), width, length)
    of_keys, of_values = (key.new_zeros(shape, dtype=torch.float32) for _ in range(2))
    with torch.autocast(query.device.type, enabled=False):
        for block in _blocks(length):
            queries, gradients = _block_of(query, key, block), _block_of(gradient.transpose(1, 2), key, block)
            peaks = largest[:, :, block].reshape(len(keys), -1, 1)
            probabilities = _probabilities(queries, keys, peaks, query, block, scale, mask)
            of_probabilities = gradients @ values[:, : block.stop].transpose(1, 2)
            of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, query.dtype).mul_(scale)
            del of_probabilities  # three blocks of scores at once suffice, here and in the next turn
            of_values[..., : block.stop] += gradients.transpose(1, 2) @ probabilities
            of_keys[..., : block.stop] += queries.transpose(1, 2) @ of_scores
            of_query[:, :, block] = (of_scores @ keys[:, : block.stop]).view(batch, heads, -1, width)
            del probabilities, of_scores
    of_key, of_value = (gradient.to(key.dtype).transpose(1, 2).reshape(key.shape) for gradient in (of_keys, of_values))
    return of_query, of_key, of_value


@_differentiate.register_fake
def _gradient_shapes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, largest: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, width = key.shape
    # the real ones are views of [batch * heads, width, seq], and inductor relies on the strides that it is told
    of_key, of_value = (rows.new_empty(batch, heads, width, length).transpose(2, 3) for rows in (key, value))
    return query.new_empty(query.shape), of_key, of_value


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, mask = inputs
    ctx.save_for_backward(query, key, value, output[1], mask)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, largest, mask = ctx.saved_tensors
    return (*_differentiate(gradient, query, key, value, largest, ctx.scale, mask), None, None)


_attend.register_autograd(_backward, setup_context=_remember)


def _blocks(length: int) -> list[slice]:
    size = _BLOCKS[int(length > _SHORT)]  # Dynamo of torch 2.11 refuses a bool as an index
    return [slice(start, min(length, start + size)) for start in range(0, length, size)]


def _flat(heads: Tensor) -> Tensor:
    """[batch, heads, seq, width] as [batch * heads, seq, width]."""
    return heads.reshape(-1, *heads.shape[2:])


def _block_of(query: Tensor, key: Tensor, block: slice) -> Tensor:
    """A block of each query head, those that share a key head one after the other: [batch * heads, rows, width]."""
    return query[:, :, block].reshape(key.shape[0] * key.shape[1], -1, query.shape[-1])


def _probabilities(
    queries: Tensor, keys: Tensor, peaks: Tensor, query: Tensor, block: slice, scale: float, mask: Tensor | None
) -> Tensor:
    """Return a block's probabilities: scores less the largest of their row are small where they matter."""
    shape = (*queries.shape[:2], block.stop)
    scores = torch.baddbmm((-peaks).expand(shape), queries, keys[:, : block.stop].transpose(1, 2), alpha=scale)
    return torch.softmax(_hide(scores, query, block, mask), -1)


def _hide(scores: Tensor, query: Tensor, block: slice, mask: Tensor | None) -> Tensor:
    """Set the scores of hidden positions to the smallest number, in place. scores [batch * heads, rows, keys]."""
    by_head = scores.view(query.shape[0], query.shape[1], -1, block.stop)
    lowest = torch.finfo(scores.dtype).min
    if mask is not None:
        by_head.masked_fill_(~mask[:, :, block, : block.stop], lowest)
    else:
        size = by_head.shape[2]
        by_head[..., block.start :] += torch.full((size, size), lowest, dtype=scores.dtype).triu(1)
    return scores
