"""Soft-capped attention on a GPU by torch's flex attention, without a matrix of scores.

Caps of scores (Gemma 2) rule out the fused kernels of `sdpa`. Flex attention compiles a kernel with the cap and the
document mask in it. It is used where it computes what the definition says; elsewhere attention stays eager.
`transformers` knows this implementation as `FLEX`. Its own makes the cap and the scale constants of the kernel, and
torch fails to compile the kernel for a second value of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.flex_attention import compile_friendly_flex_attention, repeat_kv
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    flex_attention_mask,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from echelon.learn.model.parts import autocast_dtype
from echelon.learn.model.varlen_attention import TOLERANCE, find_error, find_visible, head_width, number_documents

FLEX = "echelon_flex"
# The cap of the test. The scores of random vectors are about 1: this changes them much, a model's cap of 50 hardly.
_CAP = 1.0
# Sequences of 384 tokens: below 128, flex attention takes a kernel for generation.
_STRETCH = 8


def get_softcap(config: PretrainedConfig) -> float | None:
    """Return the cap of a model's attention scores; None if it has none."""
    return getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)


def has_flex(device: torch.device, dtype: torch.dtype, config: PretrainedConfig) -> bool:
    """Whether flex attention computes a soft-capped model's attention rightly on this device, in this dtype.

    Runs it once, forward and backward, on a few documents with a window and a cap, and compares with the definition in
    fp32. Compiles for some seconds.
    """
    width, dropout = head_width(config), getattr(config.get_text_config(decoder=True), "attention_dropout", None)
    if device.type != "cuda" or width is None or dropout:
        return False
    return find_error(run_flex, device, dtype, width, attend_capped, _STRETCH) < TOLERANCE


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    softcap: float,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that `transformers` calls, with a block mask.

    Under autocast, rotary embeddings return fp32, but values are not.
    """
    dtype = autocast_dtype(query)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    cap = query.new_full((), softcap, dtype=torch.float32)
    factor = query.new_full((), scaling / softcap, dtype=torch.float32)

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query_place: Tensor, key_place: Tensor) -> Tensor:
        return cap * torch.tanh(score * factor)

    groups = query.shape[1] // key.shape[1]
    is_power = query.shape[1] & (query.shape[1] - 1) == 0  # what flex attention asks for where heads share keys
    if not is_power:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    output = compile_friendly_flex_attention(
        query, key, value, module.training, score_mod=score_mod, block_mask=attention_mask, scale=1.0,
        enable_gqa=is_power and groups > 1,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None


def run_flex(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, window: int | None, scale: float) -> Tensor:
    """[batch, heads, seq, width] to [batch, seq, heads, width], with the cap of the test."""
    batch, length = query.shape[0], query.shape[2]
    documents = packed_sequence_mask_function(number_documents(starts, batch, length))
    reach = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    mask = flex_attention_mask(batch, length, length, mask_function=and_masks(documents, reach), device=query.device)
    return _attend(nn.Module(), query, key, value, mask, scaling=scale, softcap=_CAP)[0]


def attend_capped(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, window: int | None, scale: float
) -> Tensor:
    """The definition: the softmax of cap * tanh(scores / cap), over what a query attends to."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = _CAP * torch.tanh(query @ keys.transpose(2, 3) * scale / _CAP)
    hidden = ~find_visible(query, key, starts, window)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(1, 2)


AttentionInterface.register(FLEX, _attend)
AttentionMaskInterface.register(FLEX, flex_attention_mask)
