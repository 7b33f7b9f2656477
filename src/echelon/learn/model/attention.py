"""Chooses the attention implementation of a model, and keeps the documents of a packed sequence apart.

Which form of mask a model obeys is found by `traits`. Nothing here synchronises with the device, except the form
`positions`, from which `transformers` finds the number of documents.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from echelon.ground.errors import ConfigError
from echelon.learn.model.blocked_attention import blocked_attention, is_traced
from echelon.learn.model.flex_attention import FLEX, get_softcap
from echelon.learn.model.parts import autocast_dtype, unwrapped
from echelon.learn.model.varlen_attention import VARLEN, count_starts, find_starts

# `sdpa` under a name for which `transformers` builds no mask: without a mask, that function is causal.
PLAIN_CAUSAL = "echelon_plain_causal"
# `sdpa` under a name for which `transformers` always builds a mask. For `sdpa` it asks first whether one is needed, and
# the host waits for a GPU's answer.
PADDED = "echelon_padded"
# A mask of this form has where documents start; of layers with a window, for each query the first key it attends to.
FIRST_KEYS = "echelon_first_keys"

MaskForm = Literal["by_layer", "full", "window", "positions", "lengths"]
"""How a model is told where documents end.

`by_layer`: one 4-dimensional mask for each kind in the config's `layer_types`. `full`: one mask for all layers, which
attend to the whole past. `window`: one mask for all layers, with the config's sliding window. `positions`: position ids
that restart, from which `transformers` builds the masks. `lengths`: the start of each document, for flash attention.
"""

# Implementations that can keep documents apart: by a mask of `transformers`, or (flash) by the start of each document.
_MASKED = ("sdpa", "eager", "flex_attention", FLEX, PLAIN_CAUSAL)
_FLASH = ("flash_attention_2", "flash_attention_3")
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


def choose_attention(config: PretrainedConfig, wanted: str | None) -> str | None:
    """Return the attention implementation to request from `transformers`; None leaves the choice to it.

    Soft-capped scores (Gemma-2) rule out `sdpa`, and not every release of `transformers` refuses it: some silently
    compute without the capping.

    Raises:
        ConfigError: the recipe requests `sdpa`, which cannot compute this model.
    """
    softcap = get_softcap(config)
    if softcap is None:
        return wanted
    if wanted == "sdpa":
        raise ConfigError(
            f"model.attn_implementation=sdpa cannot cap attention scores, and the model's attn_logit_softcapping is "
            f"{softcap}; use eager or flex_attention, or remove the key."
        )
    return wanted or "eager"


def find_forms(attention: str | None) -> tuple[MaskForm, ...]:
    """Return the forms of mask that an attention implementation can use, the preferred one first."""
    if attention in (*_FLASH, VARLEN):
        return ("lengths",)
    if attention in _MASKED:
        return ("by_layer", "full", "window", "positions")
    return ()


def stand_in(attention: str | None) -> str | None:
    """Return the attention implementation with which a copy of a model on the CPU shows what this one does."""
    return VARLEN if attention in _FLASH else "sdpa" if attention == PLAIN_CAUSAL else attention


def describe_document_mask(attention: str, form: MaskForm | None) -> str:
    """Return a line for the user on how documents are kept apart."""
    if form is None:
        return "attention: the documents of a sequence run as sequences of their own; the model obeys no document mask"
    name = {PLAIN_CAUSAL: "sdpa", VARLEN: "torch's flash kernels", FLEX: "flex attention"}.get(attention, attention)
    how = {"positions": "with position ids that restart", "lengths": "with the start of each document"}
    built = how.get(form, "with a mask built once per microbatch")
    return f"attention: the documents of a sequence do not attend to each other; {name}, {built}"


def document_inputs(
    model: PreTrainedModel,
    form: MaskForm,
    documents: Tensor,
    position_ids: Tensor,
    most: int | None = None,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    queries: Tensor | None = None,
) -> dict[str, Any]:
    """Return the forward arguments, other than `input_ids`, that keep tokens from attending to other documents.

    Args:
        form: a form of mask that the model obeys.
        documents: [batch, seq], the same number for all tokens of a document, which are contiguous.
        position_ids: [batch, seq], int64, from 0 in each document.
        most: at least the number of documents of a sequence, without padding; None if it is not known.
        dtype: of the hidden states; None for that of the input embedding.
        attention: the implementation for which masks are built, or `FIRST_KEYS`, whose masks are int64: see
            `_find_bounds`; None for the model's own.
        queries: the positions of the queries of a mask, of which there may be fewer than keys; None for all.

    Returns:
        Positions, and a mask (4-dimensional, or flex attention's block mask), or one for each kind of layer, or the
        start of each document. Every token attends to itself, so no mask row is empty.

    Raises:
        KeyError: the config lacks the fields that the form needs.
    """
    if form == "positions":
        return {"position_ids": position_ids}
    if form == "lengths":
        if most == 1 and model.config._attn_implementation == VARLEN:
            return {"position_ids": position_ids}  # plain causal attention, since padding comes after the document
        room = None if most is None else len(position_ids) * count_starts(most + 1)  # padding is a document
        return {"position_ids": position_ids, **find_starts(position_ids, room)}
    config, attention = model.config.get_text_config(decoder=True), attention or model.config._attn_implementation
    if attention == FIRST_KEYS:
        options = (documents, position_ids, most, queries)
        bounds = {kind: _find_bounds(config, kind, *options) for kind in _layer_kinds(config, form)}
        return _as_inputs(position_ids, form, bounds)
    build = ALL_MASK_ATTENTION_FUNCTIONS["sdpa" if attention == PLAIN_CAUSAL else attention]
    masks = {
        kind: build(
            batch_size=documents.shape[0],
            q_length=documents.shape[1] if queries is None else len(queries),
            kv_length=documents.shape[1],
            mask_function=_choose_queries(
                queries, and_masks(packed_sequence_mask_function(documents), _reach(config, kind, position_ids))
            ),
            allow_is_causal_skip=False,
            dtype=unwrapped(model.get_input_embeddings()).weight.dtype if dtype is None else dtype,
            config=config,
            device=documents.device,
        )
        for kind in _layer_kinds(config, form)
    }
    return _as_inputs(position_ids, form, masks)


def _as_inputs(position_ids: Tensor, form: MaskForm, masks: dict[str, Any]) -> dict[str, Any]:
    """Return positions and masks, by kind of layer, as the model takes them."""
    return {"position_ids": position_ids, "attention_mask": masks if form == "by_layer" else next(iter(masks.values()))}


def _choose_queries(queries: Tensor | None, mask_function: Any) -> Any:
    """Return the mask function of some positions, None for all: query i of the result is position queries[i]."""
    if queries is None:
        return mask_function

    def of_position(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return mask_function(batch, head, queries[query], key)

    return of_position


def _layer_kinds(config: PretrainedConfig, form: MaskForm) -> list[str]:
    """Return the kinds of layers for which a form has a mask.

    Raises:
        KeyError: there are none, or masks of other kinds would be needed.
    """
    if form != "by_layer":
        return ["sliding_attention" if form == "window" else "full_attention"]
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if not kinds or not _KINDS.issuperset(kinds):
        raise KeyError("layer_types")
    return kinds


def _reach(config: PretrainedConfig, kind: str, position_ids: Tensor) -> Any:
    """Return the mask function of a kind of layer: how far back a token attends in its document."""
    if kind == "chunked_attention":
        size, places = config.attention_chunk_size, position_ids

        def in_chunk(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same: Tensor = places[batch, query] // size == places[batch, key] // size
            return same

        return and_masks(causal_mask_function, in_chunk)
    window = _find_window(config, kind)
    return causal_mask_function if window is None else sliding_window_causal_mask_function(window)


def _find_window(config: PretrainedConfig, kind: str) -> int | None:
    """Return how many tokens, with itself, a token of a kind of layer attends to; None for all."""
    window: int | None = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    return window


def _find_bounds(
    config: Any, kind: str, documents: Tensor, position_ids: Tensor, most: int | None, queries: Tensor | None
) -> Tensor:
    """Return which keys a kind of layer attends to, int64. Padding is a document, and so is a chunk of attention.

    With a window, [batch, 1, queries, 1]: the first key of each query. Else [batch, 1, 1, room]: where documents
    start, then the length of sequences, as often as there is room.
    """
    length, window = documents.shape[1], _find_window(config, kind)
    places = torch.arange(length, device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    if window is not None:
        first = torch.where(begins, places, 0).cummax(-1).values
        first = torch.maximum(first, places - window + 1)[:, None, :, None]
        return first if queries is None else first[:, :, queries]
    room = length if most is None else count_starts(most + 1)
    if kind == "chunked_attention":
        begins |= position_ids % config.attention_chunk_size == 0
        room += length // config.attention_chunk_size
    starts = places.new_full((len(places), room), length)
    return starts.scatter_reduce_(1, begins.cumsum(1) - 1, places, "amin")[:, None, None]


def _plain_causal(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute what `sdpa` computes; on a CPU in blocks where that is faster: in bf16, and in compiled fp32."""
    dtype, length = autocast_dtype(query), query.shape[2]
    is_faster = dtype == torch.bfloat16 or (dtype == torch.float32 and is_traced(length))
    if query.device.type == "cpu" and is_faster and not dropout and length == key.shape[2]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return blocked_attention(query.to(dtype), key.to(dtype), value.to(dtype), scale, attention_mask), None
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
    )
    return output, None


def _build_padded_mask(*arguments: Any, **options: Any) -> Any:
    return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})


AttentionInterface.register(PLAIN_CAUSAL, _plain_causal)
AttentionInterface.register(PADDED, sdpa_attention_forward)
AttentionMaskInterface.register(PADDED, _build_padded_mask)
