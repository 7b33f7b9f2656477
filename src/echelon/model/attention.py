"""Chooses the attention implementation of a model, and keeps the documents of a packed sequence apart.

Nothing here synchronises with the device, except `flash_attention_2`, which needs the number of documents.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from echelon.errors import ConfigError
from echelon.model.parts import FAMILIES, unwrapped

# `sdpa` under a name for which `transformers` builds no mask: without a mask, that function is causal.
PLAIN_CAUSAL = "echelon_plain_causal"
AttentionInterface.register(PLAIN_CAUSAL, sdpa_attention_forward)

# Implementations that can keep documents apart: by a mask of `transformers`, or (flash) by the start of each document.
_MASKED = ("sdpa", "eager", "flex_attention")
_FLASH = ("flash_attention_2", "flash_attention_3")
_KINDS = {"full_attention", "sliding_attention"}


def choose_attention(config: PretrainedConfig, wanted: str | None) -> str | None:
    """Return the attention implementation to request from `transformers`; None leaves the choice to it.

    Soft-capped scores (Gemma-2) rule out `sdpa`, and not every release of `transformers` refuses it: some silently
    compute without the capping.

    Raises:
        ConfigError: the recipe requests `sdpa`, which cannot compute this model.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None:
        return wanted
    if wanted == "sdpa":
        raise ConfigError(
            f"model.attn_implementation=sdpa cannot cap attention scores, and the model's attn_logit_softcapping is "
            f"{softcap}; use eager or flex_attention, or remove the key."
        )
    return wanted or "eager"


def apply_plain_causal(model: PreTrainedModel, sequence_len: int) -> None:
    """Use `sdpa` without a mask if every layer attends to the whole past at this sequence length.

    To find out that no mask is needed, `transformers` reads the positions, which makes the host wait for the device in
    every forward pass. The results are bitwise identical. Other models are left unchanged.
    """
    config = model.config
    if config._attn_implementation == "sdpa" and config.model_type in FAMILIES and _is_plain(config, sequence_len):
        model.set_attn_implementation(PLAIN_CAUSAL)


def _is_plain(config: PretrainedConfig, sequence_len: int) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    is_plain = window is None or window >= sequence_len
    return _is_causal(config) and kinds <= _KINDS and is_plain


def _is_causal(config: PretrainedConfig) -> bool:
    return getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)


def check_document_mask(config: PretrainedConfig, wanted: str | None) -> None:
    """Refuse a model or attention implementation that is not known to support document masks.

    Raises:
        ConfigError: the family is not tested (recurrent layers, for example, mix documents whatever the mask), its
            attention is not causal, or the attention implementation is not one of this file.
    """
    fix = "set data.document_mask=false, or data.packing=false for one document per sequence"
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"data.document_mask=true supports the model types {', '.join(FAMILIES)}, and the model's model_type is "
            f"{config.model_type}; {fix}."
        )
    if not _is_causal(config) or not _layer_kinds(config).keys() <= _KINDS:
        raise ConfigError(
            f"data.document_mask=true requires causal attention, full or in a sliding window, and this "
            f"{config.model_type} model has layers with another kind of attention; {fix}."
        )
    if wanted is not None and wanted not in (*_MASKED, *_FLASH):
        raise ConfigError(
            f"model.attn_implementation={wanted} is not known to support data.document_mask=true; use "
            f"{', '.join((*_MASKED, *_FLASH))} or remove the key, or {fix}."
        )


def describe_document_mask(config: PretrainedConfig, wanted: str | None) -> str:
    """Return a line for the user on how documents are kept apart."""
    attention = choose_attention(config, wanted) or "sdpa"
    how = "with the start of each document" if attention in _FLASH else "with a mask built once per microbatch"
    return f"attention: the documents of a sequence do not attend to each other; {attention}, {how}"


def document_inputs(model: PreTrainedModel, documents: Tensor, position_ids: Tensor) -> dict[str, Any]:
    """Return the forward arguments, other than `input_ids`, that keep tokens from attending to other documents.

    Args:
        documents: [batch, seq], the same number for all tokens of a document, which are contiguous.
        position_ids: [batch, seq], int64, from 0 in each document.

    Returns:
        Positions, and a mask (4-dimensional, or flex attention's block mask), per kind of layer if the family needs
        that; for flash attention, the start of each document. Every token attends to itself, so no mask row is empty.
    """
    config = model.config
    attention = config._attn_implementation
    if attention in _FLASH:
        return {"position_ids": position_ids, **_flash_lengths(position_ids)}
    build = ALL_MASK_ATTENTION_FUNCTIONS["sdpa" if attention == PLAIN_CAUSAL else attention]
    masks = {
        kind: build(
            batch_size=documents.shape[0],
            q_length=documents.shape[1],
            kv_length=documents.shape[1],
            mask_function=and_masks(
                packed_sequence_mask_function(documents),
                causal_mask_function if window is None else sliding_window_causal_mask_function(window),
            ),
            allow_is_causal_skip=False,
            dtype=unwrapped(model.get_input_embeddings()).weight.dtype,
            config=config,
            device=documents.device,
        )
        for kind, window in _layer_kinds(config).items()
    }
    by_layer = FAMILIES[config.model_type].mask == "by_layer"
    return {"position_ids": position_ids, "attention_mask": masks if by_layer else next(iter(masks.values()))}


def _layer_kinds(config: PretrainedConfig) -> dict[str, int | None]:
    """Return the kinds of attention layers in the model, with the window of each; None: the whole past."""
    window = getattr(config, "sliding_window", None)
    kinds = {
        "full": {"full_attention"},
        "window": {"sliding_attention"},
        "by_layer": set(getattr(config, "layer_types", ())),
    }[FAMILIES[config.model_type].mask]
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _flash_lengths(position_ids: Tensor) -> dict[str, Any]:
    """Return the cumulative document lengths for flash attention's varlen kernels, over all sequences end to end."""
    starts = (position_ids.flatten() == 0).nonzero().flatten().to(torch.int32)
    ends = torch.full((1,), position_ids.numel(), dtype=torch.int32, device=position_ids.device)
    sums = torch.cat([starts, ends])
    longest = position_ids.shape[1]  # an upper bound: the exact length of the longest document would need a sync
    return {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": longest, "max_length_k": longest}
