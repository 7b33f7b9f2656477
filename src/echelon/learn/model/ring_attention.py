"""Ring attention: keys and values of a sequence go around the ranks that share it, beside the computation.

Liu et al. 2023, arXiv:2310.01889. In each turn a rank attends to the keys and values of one rank, while it sends them
on to the next rank. What it has found so far is merged with what it finds by the sums of the softmax (the logarithm of
the sum of exponentials), so no rank ever has the keys of a whole sequence. The backward pass goes around once more:
gradients of keys and values follow them, and end where these belong.

A rank holds an early and a late chunk of each sequence (`SequencePart`), so all ranks compute as much in each turn:
of the keys of an earlier rank, all queries attend to the early chunk; those of a later rank are attended to by the late
queries.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from echelon.learn.distributed.peers import BY_NUMBER, Peers, give_number
from echelon.learn.distributed.sequence_part import SequencePart


class Spans(NamedTuple):
    """Stretches of queries, each of which attends to a stretch of keys, over all sequences end to end."""

    queries: Tensor
    """[stretches + 1], int32: where each begins, and the end of the last one."""
    keys: Tensor
    is_causal: bool
    """Whether a query attends to the keys up to its own place in the stretch, or to all."""


Hidden = Tensor | Spans | Literal["later"] | None
"""The hidden keys: bool [batch, 1, queries, keys]; or those of other stretches; or those after a query's place."""

# The memory-efficient kernel reads sums in groups of so many queries, and a row of a bias in groups of so many keys.
_SUMS_ALIGNED, _BIAS_ALIGNED = 32, 8
_FLASH_DTYPES, _FLASH_WIDTH = (torch.bfloat16, torch.float16), 8

aten = torch.ops.aten


class _Alone:
    """A ring of one rank, which has whole sequences."""

    rank, size = 0, 1

    def shift(self, tensor: Tensor, stream: int = 0) -> Callable[[], Tensor]:
        """Return what this rank sends to itself."""
        return tensor.clone


class Ring:
    """The ranks that share sequences. Called, it computes their attention."""

    def __init__(self, peers: Peers | None = None, compile_backend: str | None = None) -> None:
        """`peers`: None for whole sequences on this rank. `compile_backend`: of the merge of turns; None: eager."""
        self.peers = _Alone() if peers is None else peers
        self.merge: Any = _merge
        if compile_backend is not None:
            self.merge = torch.compile(_merge, backend=compile_backend, dynamic=True, fullgraph=True)
        self._number = give_number(self)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, first: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention of this rank's queries over whole sequences. Collective.

        Args:
            query: [batch, heads, part, width], of the positions that `SequencePart` gives this rank.
            key: [batch, key heads, part, width], likewise; the number of key heads divides `heads`.
            value: as `key`.
            scale: of the scores.
            first: [batch or 1, 1, part, 1], int64: the position of the first key that each query attends to; or
                [batch, 1, 1, room], int64: where documents start, ascending, then the sequence's length; None: 0.
            sinks: [heads]: the score of a further key without a value, as in gpt-oss; None: there is none.

        Returns:
            [batch, part, heads, width].
        """
        output: Tensor = _attend(query, key, value, scale, self._number, first, sinks)[0]
        return output


@torch.library.custom_op("echelon::ring_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, ring: int, first: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output, [batch, part, heads, width], and the logarithms of sums, [batch, heads, part]."""
    peers, packed = BY_NUMBER[ring].peers, torch.cat([key, value], -1)
    output = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    total = output.new_full(query.shape[:3], -torch.inf)
    if sinks is not None:  # what a query has found before the first turn: a key without a value
        total.copy_(sinks[:, None].expand_as(total))
    with torch.autocast(query.device.type, enabled=False):
        for turn in range(peers.size):
            receive = peers.shift(packed) if turn + 1 < peers.size else None
            block = _find_block(peers, turn, query, first)
            keys, values = torch.split(block.of_keys(packed), [key.shape[-1], value.shape[-1]], -1)
            block_output, sums = attend_block(block.of_queries(query), keys, values, block.hides, scale)
            BY_NUMBER[ring].merge(block.of_queries(output), block.of_queries(total), block_output, sums)
            packed = packed if receive is None else receive()
    return output.transpose(1, 2).to(query.dtype).contiguous(), total


@_attend.register_fake
def _shapes(
    query: Tensor, key: Tensor, value: Tensor, scale: float, ring: int, first: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, heads, part, width = query.shape
    return query.new_empty(batch, part, heads, width), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("echelon::ring_attention_backward", mutates_args=())
def _differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    scale: float,
    ring: int,
    first: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, which are summed in fp32."""
    peers, packed = BY_NUMBER[ring].peers, torch.cat([key, value], -1)
    of_query = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    of_packed = of_query.new_zeros(packed.shape)
    receive_sum: Callable[[], Tensor] | None = None
    with torch.autocast(query.device.type, enabled=False):
        for turn in range(peers.size):
            receive = peers.shift(packed) if turn + 1 < peers.size else None
            block = _find_block(peers, turn, query, first)
            keys, values = torch.split(block.of_keys(packed), [key.shape[-1], value.shape[-1]], -1)
            result = AttentionResult(*(block.of_queries(tensor) for tensor in (output, total, gradient)))
            grads = differentiate_block(block.of_queries(query), keys, values, block.hides, scale, result)
            block.of_queries(of_query).add_(grads[0])
            turn_sum = of_packed if turn == 0 else torch.zeros_like(of_packed)
            block.of_keys(turn_sum).add_(torch.cat(grads[1:], -1))
            if turn > 0:  # the ranks before this one have added their part; the last one sends the sum to its owner
                turn_sum = turn_sum if receive_sum is None else turn_sum.add_(receive_sum())
                receive_sum = peers.shift(turn_sum, stream=1)
            packed = packed if receive is None else receive()
    of_packed = of_packed if receive_sum is None else of_packed.add_(receive_sum())
    parts = torch.split(of_packed, [key.shape[-1], value.shape[-1]], -1)
    of_key, of_value = (part.to(key.dtype).contiguous() for part in parts)
    return of_query.to(query.dtype), of_key, of_value


@_differentiate.register_fake
def _gradient_shapes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, ctx.ring, first, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, first, sinks)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, output, total, first, sinks = ctx.saved_tensors
    by_head = (gradient.transpose(1, 2), query, key, value, output.transpose(1, 2), total)
    grads = _differentiate(*by_head, ctx.scale, ctx.ring, first)
    of_sinks = None
    if sinks is not None:
        shares = (sinks.float()[:, None] - total).exp()
        of_sinks = -(shares * (gradient.float() * output).sum(-1).transpose(1, 2)).sum((0, 2)).to(sinks.dtype)
    return (*grads, None, None, None, of_sinks)


_attend.register_autograd(_backward, setup_context=_remember)


class _Block(NamedTuple):
    """The queries and keys of a turn, and which keys are hidden from which queries: see `attend_block`."""

    queries: slice
    keys: slice
    hides: Hidden

    def of_queries(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, self.queries]

    def of_keys(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, self.keys]


def _find_block(peers: Peers | _Alone, turn: int, query: Tensor, first: Tensor | None) -> _Block:
    """Return what this rank computes in a turn, when it has the keys of the rank `turn` places before it."""
    length, owner = query.shape[2], (peers.rank - turn) % peers.size
    whole, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    queries = late if owner > peers.rank else whole
    keys = early if owner < peers.rank else whole
    if first is None:
        return _Block(queries, keys, "later" if owner == peers.rank else None)
    places = torch.arange(length * peers.size, device=query.device)
    of_queries = SequencePart(peers.rank, peers.size).take(places)[queries]
    of_keys = SequencePart(owner, peers.size).take(places)[keys]
    if first.shape[2] > 1:
        first = first[:, :, queries]
    elif _is_flash(query, None):
        return _Block(queries, keys, find_spans(first[:, 0, 0], of_queries, of_keys, owner == peers.rank))
    else:
        first = first.masked_fill(first > of_queries[:, None], 0).amax(-1, keepdim=True)
    is_hidden = (of_keys > of_queries[:, None]) | (of_keys < first)
    return _Block(queries, keys, is_hidden.expand(query.shape[0], -1, -1, -1))


def find_spans(starts: Tensor, queries: Tensor, keys: Tensor, is_causal: bool) -> Spans:
    """Return a stretch for each document, of which queries, keys or both may be empty.

    Args:
        starts: [batch, room]: see `Ring`.
        queries: [queries], int64, ascending: the positions of the queries in their sequences.
        keys: [keys], likewise: the same positions, or earlier ones.
        is_causal: whether they are the same.
    """
    rows, cuts = torch.arange(len(starts), device=starts.device)[:, None], list[Tensor]()
    for places in (queries, keys):
        begins = torch.searchsorted(places, starts) + rows * len(places)
        cuts.append(pad(begins.flatten(), (0, 1), value=len(starts) * len(places)).int())
    return Spans(cuts[0], cuts[1], is_causal)


def _repeat(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Repeat keys and values for each query head, for kernels that take no groups."""
    return [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in tensors]


def _sum_groups(gradient: Tensor, key: Tensor) -> Tensor:
    """Sum the gradients of the query heads that share a key head, in fp32."""
    grouped = gradient.view(*key.shape[:2], -1, *gradient.shape[2:])
    return grouped.sum(2, dtype=torch.float32)


def _merge(output: Tensor, total: Tensor, found: Tensor, sums: Tensor) -> None:
    """Merge what queries find in further keys with what they have found, in place."""
    merged = torch.logaddexp(total, sums)
    output.mul_((total - merged).exp()[..., None]).add_((sums - merged).exp()[..., None] * found)
    total.copy_(merged)


def attend_block(query: Tensor, key: Tensor, value: Tensor, hides: Hidden, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention to a block of keys by torch's kernels, without a gradient.

    The operations are those that `scaled_dot_product_attention` calls. They return the sums that merge the results of
    several blocks, and their backward passes take the output and the sums over the keys of all blocks. A query from
    which all keys are hidden has a finite sum, which vanishes beside that of any other block.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, key heads, keys, width]; the number of key heads divides `heads`.
        value: as `key`.
        hides: the hidden keys.
        scale: of the scores.

    Returns:
        The output, as `query`, and the logarithm of each query's sum of exponentials, [batch, heads, queries], fp32.
    """
    bias, is_causal = _find_bias(query, hides), isinstance(hides, str)
    outs: Any
    if isinstance(hides, Spans):
        joined = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        ends = (hides.queries, hides.keys, query.shape[2], key.shape[2])
        outs = aten._flash_attention_forward(*joined, *ends, 0.0, hides.is_causal, False, scale=scale)
        output, sums = (joint.unflatten(dim, query.shape[:3:2]) for dim, joint in enumerate(outs[:2]))
        return output.transpose(1, 2), sums.where(sums != torch.inf, -torch.inf).transpose(0, 1)  # inf: without keys
    if query.device.type == "cpu":
        outs = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _is_flash(query, bias):
        outs = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    else:
        tensors = (query, *_repeat(query, key, value))
        outs = aten._scaled_dot_product_efficient_attention(*tensors, bias, True, 0.0, is_causal, scale=scale)
    return outs[0], outs[1].narrow(2, 0, query.shape[2])


class AttentionResult(NamedTuple):
    """What the queries have found in the keys of all blocks, as `attend_block` returns it, and its gradient."""

    output: Tensor
    sums: Tensor
    gradient: Tensor


def differentiate_block(
    query: Tensor, key: Tensor, value: Tensor, hides: Hidden, scale: float, result: AttentionResult
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. Arguments as those of `attend_block`."""
    bias, is_causal = _find_bias(query, hides), isinstance(hides, str)
    output, sums, gradient = result
    grads: Any
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout, of which there is none
    if isinstance(hides, Spans):
        joined = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (gradient, query, key, value, output))
        ends = (hides.queries, hides.keys, query.shape[2], key.shape[2])
        state = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)  # likewise
        sums = sums.transpose(0, 1).flatten(1)
        grads = aten._flash_attention_backward(*joined, sums, *ends, 0.0, hides.is_causal, *state, scale=scale)
        pairs = zip(grads, (query, key, value), strict=True)
        grads = [grad.unflatten(0, like.shape[:3:2]).transpose(1, 2) for grad, like in pairs]
    elif _is_flash(query, bias):
        lengths = (None, None, query.shape[2], key.shape[2])
        grads = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output, sums.contiguous(), *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
    else:
        repeated = (gradient, query, *_repeat(query, key, value), output)
        if query.device.type == "cpu":  # it takes groups too, but sums their gradients in the dtype of the keys
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *repeated, sums, 0.0, is_causal, attn_mask=bias, scale=scale
            )
        else:
            padded = pad(sums, (0, -sums.shape[2] % _SUMS_ALIGNED), value=torch.inf)
            options = (0.0, [True, True, True, False], is_causal)
            grads = aten._scaled_dot_product_efficient_attention_backward(
                *repeated[:4], bias, output, padded, seed, seed, *options, scale=scale
            )
        grads = (grads[0], *(_sum_groups(grad, key) for grad in grads[1:3]))
    return grads[0], grads[1], grads[2]


def _is_flash(query: Tensor, bias: Tensor | None) -> bool:
    """Whether a GPU computes this with the flash kernel, which is faster than the memory-efficient one."""
    fits = query.dtype in _FLASH_DTYPES and query.shape[-1] % _FLASH_WIDTH == 0
    return fits and query.device.type != "cpu" and bias is None


def _find_bias(query: Tensor, hides: Hidden) -> Tensor | None:
    """Return what is added to scores, [batch, 1 or heads, queries, keys]."""
    if not isinstance(hides, Tensor):
        return None
    bias = torch.zeros(hides.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(hides, torch.finfo(query.dtype).min / 2)
    if query.device.type == "cpu":
        return bias
    aligned = pad(bias, (0, -bias.shape[-1] % _BIAS_ALIGNED)).narrow(-1, 0, bias.shape[-1])
    return aligned.expand(-1, query.shape[1], -1, -1)
