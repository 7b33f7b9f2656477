"""Attention over sequences that are divided between ranks: context parallelism.

`allgather` gathers the keys and values of whole sequences on every rank, whose queries stay where they are. `ulysses`
(Jacobs et al. 2023, arXiv:2309.14509) exchanges positions for heads: each rank computes some heads over whole
sequences. `ring` sends keys and values around while it attends to them: see `ring_attention`. `transformers` knows this
implementation as `CONTEXT`, and builds no mask for it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from echelon.learn.distributed.sequence_part import SequencePart, in_order, in_parts
from echelon.learn.model.attention import FIRST_KEYS, PLAIN_CAUSAL, document_inputs
from echelon.learn.model.parts import autocast_dtype
from echelon.learn.model.traits import Traits
from echelon.recipe.training import CpMethod

if TYPE_CHECKING:
    from echelon.learn.distributed.peers import Peers

CONTEXT = "echelon_context"
# Implementations whose mask says, for each query and key, whether one attends to the other.
BY_MASK = ("sdpa", "eager", PLAIN_CAUSAL)


class Context:
    """How the attention of a model is divided.

    Attributes:
        peers: the ranks that share sequences.
        part: what this rank holds of each sequence.
        method: see the module.
        attention: the implementation that computes attention after the exchange, by its name in `transformers`.
    """

    def __init__(self, peers: "Peers", method: CpMethod, attention: str, compile_backend: str | None = None) -> None:
        """`compile_backend`: what compiles the merges of a ring; None: nothing."""
        self.peers = peers
        self.part = SequencePart(peers.rank, peers.size)
        self.method = method
        self.attention = attention
        self._is_divided = True
        self._rings = None
        if method == "ring":
            from echelon.learn.model.ring_attention import Ring

            self._rings = {True: Ring(peers, compile_backend), False: Ring()}  # by whether sequences are divided

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Scope of forward passes over whole sequences, which every rank computes itself, without exchanges."""
        self._is_divided = False
        try:
            yield
        finally:
            self._is_divided = True

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        """Compute attention for this rank's queries: [batch, heads, part, width] to [batch, part, heads, width]."""
        if self._rings is not None:
            assert not options.get("dropout"), "the planner refuses dropout"
            scaling, dtype = options.get("scaling"), autocast_dtype(query)
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
            return self._rings[self._is_divided](*inputs, scale, mask, options.get("s_aux"))
        if options.get("s_aux") is not None:
            raise NotImplementedError("its attention has sinks, for which there is cp_method: ring")
        return self._exchange(module, query, key, value, mask, **options)

    def _exchange(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        if not self._is_divided:
            return self._attend_whole(module, query, key, value, mask, **options)
        if self.method == "ulysses":
            return self._exchange_heads(module, query, key, value, mask, **options)
        gathered = in_order(self.peers.gather(torch.cat([key, value], -1)), 2)
        keys, values = torch.split(gathered, [key.shape[-1], value.shape[-1]], -1)
        size, results = query.shape[2] // 2, []
        for index, chunk in enumerate(self.part.chunks):
            rows, end = slice(index * size, (index + 1) * size), (chunk + 1) * size
            seen = None if mask is None else mask[:, :, rows, :end]
            inputs = (query[:, :, rows], keys[:, :, :end], values[:, :, :end])
            results.append(_attend_masked(self.attention, *inputs, seen, **options))
        return torch.cat(results, 1)

    def _exchange_heads(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        """Exchange the positions of all heads for all positions of some heads, and back.

        Heads of keys and values that do not divide are repeated, so that each rank has those that its queries need.
        """
        peers, batch, length = self.peers, query.shape[0], query.shape[2]
        copies = math.lcm(key.shape[1], peers.size) // key.shape[1]
        tensors = (query, *(tensor.repeat_interleave(copies, 1) for tensor in (key, value)))
        shapes = [(tensor.shape[1] // peers.size, tensor.shape[-1]) for tensor in tensors]  # (heads, width) of a rank
        # [size, batch, part, heads * width] each: the heads of a rank side by side
        sent = [tensor.transpose(1, 2).reshape(batch, length, peers.size, -1).movedim(2, 0) for tensor in tensors]
        whole = in_order(peers.swap(torch.cat(sent, -1)), 1)
        parts = torch.split(whole, [number * width for number, width in shapes], -1)
        heads = [part.view(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
        own_query, own_key, own_value = (head.transpose(1, 2) for head in heads)
        output = self._attend_whole(module, own_query, own_key, own_value, mask, **options)
        received = peers.swap(in_parts(output, peers.size, 1))
        # [size, batch, part, heads, width] to all heads of this rank's positions
        return received.permute(1, 2, 0, 3, 4).reshape(batch, length, query.shape[1], -1)

    def _attend_whole(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        """Attention of whole sequences, [batch, seq, heads, width], with a part of the heads or all of them."""
        if self.attention in BY_MASK:
            return _attend_masked(self.attention, query, key, value, mask, **options)
        output: Tensor = ALL_ATTENTION_FUNCTIONS[self.attention](module, query, key, value, mask, **options)[0]
        return output


def _attend_masked(
    attention: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """Attention by the definition (`eager`) or by torch's fused kernels.

    Args:
        mask: bool [batch or 1, 1, queries, keys], True for what a query attends to; None: everything up to its own
            position, and the queries are the last positions of the keys.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    if attention != "eager":
        assert softcap is None, "no fused kernel caps scores"
        is_square = query.shape[2] == key.shape[2]
        if mask is None and not is_square:
            shape = (query.shape[2], key.shape[2])
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(key.shape[2] - query.shape[2])
        output = scaled_dot_product_attention(
            query, key, value, mask, dropout, mask is None, scale=scale, enable_gqa=groups > 1
        )
        return output.transpose(1, 2)
    assert mask is not None, "eager attention is always given a mask"
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    shares = drop(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return (shares @ value.repeat_interleave(groups, 1)).transpose(1, 2)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The function that `transformers` calls. `apply_context` has given the module its `context`."""
    context: Any = module.context
    return context.attend(module, query, key, value, attention_mask, **options), None


def divided_inputs(
    model: PreTrainedModel,
    context: Context,
    traits: Traits,
    input_ids: Tensor,
    part: SequencePart | None,
    documents: Tensor | None = None,
    position_ids: Tensor | None = None,
    most: int | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return the forward arguments, other than `input_ids`, of a model whose attention is divided.

    Args:
        traits: of the model with `context.attention`.
        input_ids: what `part` holds of each sequence, or whole sequences if it is None.
        documents: see `document_inputs`, of whole sequences; None if each sequence is one document.
        position_ids: likewise; None counts from the start of the sequence.
        most: see `document_inputs`.
        dtype: likewise.
    """
    (batch, width), device = input_ids.shape, input_ids.device
    places = torch.arange(width * (1 if part is None else part.size), device=device)
    positions = places.expand(batch, -1) if position_ids is None else position_ids
    inputs: dict[str, Any] = {}
    if documents is not None or not traits.skips_mask:
        assert traits.mask is not None, "a model without document masks cannot be divided"
        documents, most = (torch.zeros_like(positions), 1) if documents is None else (documents, most)
        attention = "sdpa" if context.attention in BY_MASK else context.attention
        # The queries of a mask are those of this rank, or with `ulysses` those of whole sequences.
        queries = None if part is None or context.method == "ulysses" else part.take(places)
        if context.method == "ring":
            attention = FIRST_KEYS
        inputs = document_inputs(model, traits.mask, documents, positions, most, dtype, attention, queries)
    return inputs | {"position_ids": positions if part is None else part.take(positions)}


def find_attention(model: Any) -> str:
    """Return the implementation that computes a model's attention, divided or not, by its name in `transformers`."""
    name: str = model.config._attn_implementation
    return next(module.context.attention for module in model.modules()) if name == CONTEXT else name


def use_context(model: Any, context: Context) -> None:
    """Make the attention of a model, on meta or not, compute what `context` says."""
    model.set_attn_implementation(CONTEXT)
    for module in model.modules():
        module.context = context


AttentionInterface.register(CONTEXT, _attend)
