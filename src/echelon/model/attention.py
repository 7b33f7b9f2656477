"""Which attention a model runs: the one its config means, documents kept apart where a sequence holds several.

Nothing here asks the device anything, except for `flash_attention_2`, which has to know how many documents there are.
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

# `sdpa` under a name for which `transformers` builds no mask: without one, that function is causal by itself.
PLAIN_CAUSAL = "echelon_plain_causal"
AttentionInterface.register(PLAIN_CAUSAL, sdpa_attention_forward)

# The attentions that keep documents apart here: by a mask of `transformers`, or (flash) by where documents begin.
_MASKED = ("sdpa", "eager", "flex_attention")
_FLASH = ("flash_attention_2", "flash_attention_3")
_KINDS = {"full_attention", "sliding_attention"}


def choose_attention(config: PretrainedConfig, wanted: str | None) -> str | None:
    """The attention to ask `transformers` for; None leaves it the choice.

    Soft-capped scores (Gemma-2) rule out `sdpa`, and not every release of `transformers` says so: some compute without
    the capping, in silence.

    Raises:
        ConfigError: `sdpa` was asked for and cannot compute this model.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None:
        return wanted
    if wanted == "sdpa":
        raise ConfigError(
            f"model.attn_implementation=sdpa cannot cap attention scores, and the model's attn_logit_softcapping is "
            f"{softcap}; use eager or flex_attention, or leave it out."
        )
    return wanted or "eager"


def apply_plain_causal(model: PreTrainedModel, sequence_len: int) -> None:
    """Spare a model on `sdpa` its mask, where every layer attends to the whole past of sequences of this length.

    To learn that no mask is needed, `transformers` looks at the positions, and so lets the host wait for the device in
    every forward pass. The result is the same bit for bit; any other model is left as it is.
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
    """Refuse what is not known to keep the documents of a sequence apart.

    Raises:
        ConfigError: a family that nobody compared (one whose layers carry a state from token to token would mix
            documents whatever the mask), attention to what follows, or another attention than those of this file.
    """
    fix = "set data.document_mask=false, or data.packing=false for one document a sequence"
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"data.document_mask=true keeps documents apart in the families {', '.join(FAMILIES)}, and the model's "
            f"model_type is {config.model_type}; {fix}."
        )
    if not _is_causal(config) or not _layer_kinds(config).keys() <= _KINDS:
        raise ConfigError(
            f"data.document_mask=true goes with attention to the past, whole or in a window, and the layers of this "
            f"{config.model_type} attend otherwise; {fix}."
        )
    if wanted is not None and wanted not in (*_MASKED, *_FLASH):
        raise ConfigError(
            f"model.attn_implementation={wanted} is not known to keep documents apart; use "
            f"{', '.join((*_MASKED, *_FLASH))} or leave it out, or {fix}."
        )


def describe_document_mask(config: PretrainedConfig, wanted: str | None) -> str:
    """A line on how documents are kept apart."""
    attention = choose_attention(config, wanted) or "sdpa"
    how = "told where each begins" if attention in _FLASH else "with a mask that is made once a microbatch"
    return f"attention: documents of a sequence do not see each other; {attention}, {how}"


def document_inputs(model: PreTrainedModel, documents: Tensor, position_ids: Tensor) -> dict[str, Any]:
    """What a decoder's forward takes beside `input_ids`, so that no token attends to another document.

    Args:
        documents: [batch, seq], equal for the tokens of one document; tokens of one stand together.
        position_ids: [batch, seq], int64, from 0 in each document.

    Returns:
        Positions and a mask, 4-dimensional or flex attention's, by kind of layer where the family wants that; for flash
        attention where each document begins. Every token sees itself, so no row of a mask is empty.
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
    """The kinds of layers there are, and how far back each sees; None: the whole past."""
    window = getattr(config, "sliding_window", None)
    kinds = {
        "full": {"full_attention"},
        "window": {"sliding_attention"},
        "by_layer": set(getattr(config, "layer_types", ())),
    }[FAMILIES[config.model_type].mask]
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _flash_lengths(position_ids: Tensor) -> dict[str, Any]:
    """The sums of document lengths that varlen kernels of flash attention go by, over all sequences end to end."""
    starts = (position_ids.flatten() == 0).nonzero().flatten().to(torch.int32)
    ends = torch.full((1,), position_ids.numel(), dtype=torch.int32, device=position_ids.device)
    sums = torch.cat([starts, ends])
    longest = position_ids.shape[1]  # an upper bound; the longest document's length the host would have to ask for
    return {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": longest, "max_length_k": longest}
