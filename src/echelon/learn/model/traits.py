"""Finds what a model can do by running a small copy of it on the CPU: document masks, and a loss in chunks.

There is no list of model types. A form of mask is used only if, on the copy, other tokens in one document leave the
logits of all other documents unchanged bit for bit, and each document has the logits that `transformers` computes for
it alone. A loss in chunks is used only if backbone, head and arithmetic reproduce the copy's own logits.
"""

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from echelon.learn.model.attention import PLAIN_CAUSAL, MaskForm, document_inputs, find_forms, stand_in
from echelon.learn.model.parts import HeadArithmetic, vocabulary_class
from echelon.learn.model.small_copy import (
    MAX_PARAMETERS,
    SMALL_PARAMETERS,
    ConfigKey,
    config_parts,
    count_parameters,
    other_tokens,
    random_tokens,
    randomize,
    smaller_copies,
    transformers_silenced,
)
from echelon.learn.model.varlen_attention import VARLEN

# Lengths of the documents in two sequences; the rest is padding. Each length occurs once in both sequences.
_DOCUMENTS = ((9, 11, 5), (11, 5, 9))
_PADDING = 3
_LENGTH = sum(_DOCUMENTS[0]) + _PADDING
# The (sequence, document) pairs that get other tokens.
_CHANGED = ((0, 1), (1, 0))
# Config fields that limit how far back a position attends, by the end of their names. In the copy the limit is shorter
# than a document, so that a mask without it is noticed.
_SPANS = ("sliding_window", "window_size", "attention_chunk_size", "index_topk")
_SHORT_SPAN = 4
# The field of rotary embeddings that change with the longest position in a batch, and its value in the copy.
_ROPE_LIMIT, _SHORT_ROPE = "original_max_position_embeddings", 8
# A cap of attention scores that changes logits: those of random weights are about 1.
_SHORT_CAP = 1.0
# Logits may differ by this fraction of the largest one; a wrong mask or head changes them by 1e-2 or more.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Traits:
    """What a model can do.

    Attributes:
        mask: the form of document mask that the model obeys; None if no form keeps documents apart.
        obstacle: the reason why there is none, as the end of a sentence about the model; empty if there is one.
        arithmetic: how the head computes logits from the backbone's hidden states; None if that is not known, so that
            losses need the model's own forward.
        skips_mask: whether the attention needs no mask of `transformers` for plain text: `sdpa`, because every layer
            attends to the whole past, or flash attention, because each layer names its window.
    """

    mask: MaskForm | None
    obstacle: str
    arithmetic: HeadArithmetic | None
    skips_mask: bool


def find_traits(model: PreTrainedModel, sequence_len: int | None = None) -> Traits:
    """Find the traits of a model, on meta or not, with an adapter or without; once per config and process.

    Takes tenths of a second on one core. Keeps the global random state.

    Args:
        sequence_len: the length of sequences: windows, and rotary embeddings that change beyond some length, matter if
            they are shorter. None: sequences of any length.
    """
    return _find_traits(
        ConfigKey(model.config, vocabulary_class(model), stand_in(model.config._attn_implementation), sequence_len)
    )


def apply_plain_causal(model: PreTrainedModel, traits: Traits) -> None:
    """Use `sdpa` without a mask if the model needs none for plain text.

    To find out that no mask is needed, `transformers` reads the positions, which makes the host wait for the device in
    every forward pass. The results are bitwise identical. Other models are left unchanged.
    """
    if model.config._attn_implementation == "sdpa" and traits.skips_mask and traits.mask != "positions":
        model.set_attn_implementation(PLAIN_CAUSAL)


def computes_as_eager(model: PreTrainedModel, attention: str, sequence_len: int | None = None) -> bool:
    """Whether a soft-capped model computes with another attention what it computes with eager attention.

    By a small copy on the CPU, with a cap that changes its logits. Keeps the global random state.
    """
    config = copy.deepcopy(model.config)
    config.get_text_config(decoder=True).attn_logit_softcapping = _SHORT_CAP
    with undisturbed():
        try:
            small = build_copies(vocabulary_class(model), config, "eager", sequence_len)[0]
            tokens = random_tokens(small, 2, _LENGTH)
            expected = run_copy(small, tokens)
            small.set_attn_implementation(attention)
            return is_close(run_copy(small, tokens), expected)
        except Exception:  # a family may fail in any way
            return False


def describe_obstacle(traits: Traits, config: PretrainedConfig) -> str | None:
    """Return why a model cannot keep the documents of a sequence apart, as a clause; None if it can."""
    if traits.mask is not None:
        return None
    return f"this {config.model_type} model cannot keep the documents of a sequence apart: {traits.obstacle}"


@lru_cache(maxsize=64)
def _find_traits(key: ConfigKey) -> Traits:
    model_class, attention, sequence_len = key.others
    with undisturbed():
        try:
            copies = build_copies(model_class, key.config, attention, sequence_len)
        except Exception as error:  # a family may fail in any way as it is built
            obstacle = f"there is no proof, as no small copy of it runs ({describe_error(error)})"
            return Traits(None, obstacle, None, False)
        mask, obstacle = _find_mask(copies[0], attention)
        skips = attention in ("sdpa", VARLEN) and _is_same_without_mask(copies[0], attention)
        arithmetics = [_find_arithmetic(copy, key.config) for copy in copies]
        return Traits(mask, obstacle, arithmetics[0] if arithmetics[0] == arithmetics[-1] else None, skips)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Silence warnings, which concern the copy, and keep the random state. Flex attention is not compiled."""
    stance = torch.compiler.set_stance("force_eager")
    with transformers_silenced(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad(), stance:
        warnings.simplefilter("ignore")
        yield


def build_copies(
    model_class: type[PreTrainedModel], config: PretrainedConfig, attention: str | None, sequence_len: int | None
) -> list[PreTrainedModel]:
    """Build the model as it is if it is small, else two reduced copies of different width and depth.

    A factor that a model derives from its size differs between the two.
    """
    bound = _bind_spans(config, sequence_len)
    if _count_built(model_class, bound) <= SMALL_PARAMETERS:
        return [build_copy(model_class, bound, attention)]
    narrow, wide = smaller_copies(bound), itertools.islice(smaller_copies(bound, widen=2), 1, None)
    return [_build_first(model_class, config, attention) for config in (narrow, wide)]


def _bind_spans(config: PretrainedConfig, sequence_len: int | None) -> PretrainedConfig:
    """Return a copy in which limits that are shorter than sequences are shorter than the documents of the test."""
    bound = copy.deepcopy(config)
    for part in config_parts(bound):
        part._attn_implementation_internal = None  # flash attention cannot be built without its package
        for name, value in list(vars(part).items()):
            if name.endswith(_SPANS):
                setattr(part, name, _shorten(value, _SHORT_SPAN, sequence_len))
        parameters = getattr(part, "rope_parameters", None) or {}
        # They are given once, or for each kind of layer.
        tables = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
        for table in tables:
            if _ROPE_LIMIT in table:
                table[_ROPE_LIMIT] = _shorten(table[_ROPE_LIMIT], _SHORT_ROPE, sequence_len)
        is_dynamic = any(table.get("rope_type") == "dynamic" for table in tables)
        for name in (_ROPE_LIMIT, *(["max_position_embeddings"] if is_dynamic else [])):
            if hasattr(part, name):
                setattr(part, name, _shorten(getattr(part, name), _SHORT_ROPE, sequence_len))
    return bound


def _shorten(value: Any, short: int, sequence_len: int | None) -> Any:
    """Return `short` for a larger number that is less than the length of sequences; anything else unchanged."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return short if is_number and value > short and (sequence_len is None or value < sequence_len) else value


def _count_built(model_class: type[PreTrainedModel], config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return count_parameters(model_class._from_config(copy.deepcopy(config)))


def _build_first(
    model_class: type[PreTrainedModel], configs: Iterator[PretrainedConfig], attention: str | None
) -> PreTrainedModel:
    """Build the first copy that is small enough and runs. Raises what the last one raised."""
    failure: Exception = ValueError("every copy is too large")
    for config in configs:
        try:
            if _count_built(model_class, config) <= MAX_PARAMETERS:
                model = build_copy(model_class, config, attention)
                run_copy(model, random_tokens(model, 1, _LENGTH))
                return model
        except Exception as error:  # a reduced config may break a family's own assumptions in any way
            failure = error
    raise failure


def build_copy(model_class: type[PreTrainedModel], config: PretrainedConfig, attention: str | None) -> PreTrainedModel:
    """Build a model with random weights and without dropout, fp32, on the CPU.

    Experts are computed token by token: in groups, the rounding of one token depends on the others.
    """
    torch.manual_seed(0)
    model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    if attention is not None:
        model.set_attn_implementation(attention)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    randomize(model)
    return model


def run_copy(model: PreTrainedModel, tokens: Tensor, **inputs: Any) -> Tensor:
    """Return the logits of a copy, [batch, seq, vocabulary]. `inputs`: further arguments of its forward."""
    logits: Tensor = model(input_ids=tokens, use_cache=False, **inputs).logits
    return logits


def describe_error(error: Exception) -> str:
    """Return the type and the beginning of an error's message, for a sentence about a model."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


@dataclass(frozen=True)
class PackedPair:
    """Two sequences of documents: their tokens, the same with other tokens in some documents, and the number and the
    positions of each document. All [2, _LENGTH]."""

    tokens: Tensor
    changed: Tensor
    documents: Tensor
    positions: Tensor

    def cut(self, values: Tensor) -> dict[tuple[int, int], Tensor]:
        """Return the values of each document, [tokens, ...], by (sequence, document)."""
        return {
            (row, number): values[row][self.documents[row] == number]
            for row, lengths in enumerate(_DOCUMENTS)
            for number in range(len(lengths))
        }


def pack_documents(model: PreTrainedModel) -> PackedPair:
    """Return two sequences of documents with random tokens. Sets the global seed."""
    torch.manual_seed(1)
    tokens = random_tokens(model, 2, _LENGTH)
    documents = torch.full((2, _LENGTH), -1)
    for row, lengths in enumerate(_DOCUMENTS):
        documents[row, : sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(size) for lengths in _DOCUMENTS for size in (*lengths, _PADDING)]).view(2, -1)
    changed = tokens.clone()
    for row, number in _CHANGED:
        where = documents[row] == number
        changed[row, where] = other_tokens(model, tokens[row, where])
    return PackedPair(tokens, changed, documents, positions)


def _find_mask(model: PreTrainedModel, attention: str | None) -> tuple[MaskForm | None, str]:
    """Return the first form of mask that the model obeys; or None and the reason."""
    forms, faults = find_forms(attention), list[tuple[int, str]]()
    if not forms:
        return None, f"model.attn_implementation={attention} takes no such mask; remove that key"
    packed = pack_documents(model)
    try:
        alone = {document: run_copy(model, tokens[None])[0] for document, tokens in packed.cut(packed.tokens).items()}
    except Exception as error:  # transformers raises many types of exception
        return None, f"its forward pass fails ({describe_error(error)})"
    for form in forms:
        fault = _find_fault(model, form, packed, alone)
        if fault is None:
            return form, ""
        faults.append(fault)
    return None, max(faults)[1]


def _find_fault(
    model: PreTrainedModel, form: MaskForm, packed: PackedPair, alone: dict[tuple[int, int], Tensor]
) -> tuple[int, str] | None:
    """Return what is wrong with a form of mask, with how far it came; None if the model obeys it."""
    try:
        inputs = document_inputs(model, form, packed.documents, packed.positions)
        before, after = (packed.cut(run_copy(model, tokens, **inputs)) for tokens in (packed.tokens, packed.changed))
    except Exception as error:  # a model may refuse a mask in any way
        return 0, f"its forward pass takes no such mask ({describe_error(error)})"
    if not all(torch.equal(before[document], after[document]) for document in alone if document not in _CHANGED):
        return 1, "a document changes what the model computes for the documents after it, whatever the mask"
    if not all(is_close(before[document], alone[document]) for document in alone):
        return 2, "after another document it does not compute what it computes for the document alone"
    return None


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding, relative to the largest expected value."""
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _is_same_without_mask(model: PreTrainedModel, attention: str) -> bool:
    """Whether no mask gives the logits of `sdpa` with those of `transformers`: with `sdpa` itself bit for bit."""
    tokens = random_tokens(model, 2, _LENGTH)
    try:
        model.set_attn_implementation("sdpa")
        expected = run_copy(model, tokens)
        if attention != "sdpa":
            model.set_attn_implementation(attention)
            return is_close(run_copy(model, tokens), expected)
        model.set_attn_implementation(PLAIN_CAUSAL)
        return torch.equal(run_copy(model, tokens), expected)
    except Exception:  # then the mask stays
        return False
    finally:
        model.set_attn_implementation(attention)


def _find_arithmetic(model: PreTrainedModel, config: PretrainedConfig) -> HeadArithmetic | None:
    """Find the arithmetic that turns the head's output into the model's logits; None if there is no such.

    The rows of the head differ in size, so that logits do: a cap changes large ones only. In training mode, a dropout
    between backbone and head would be noticed.
    """
    head, backbone = model.get_output_embeddings(), model.base_model
    if backbone is model or not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None  # a head with parameters of its own beside weight and bias may be a plain one only at first
    head.weight.mul_(torch.logspace(-1, 2, len(head.weight))[:, None])
    model.train()
    try:
        tokens = random_tokens(model, 2, _LENGTH)
        torch.manual_seed(2)
        expected = run_copy(model, tokens)
        torch.manual_seed(2)
        raw = head(backbone(input_ids=tokens, use_cache=False).last_hidden_state)
    except Exception:  # a backbone with other outputs
        return None
    if raw.shape != expected.shape:
        return None
    candidates = _arithmetics(model.config, config)
    return next((arithmetic for arithmetic in candidates if is_close(arithmetic.apply(raw), expected)), None)


def _arithmetics(small: PretrainedConfig, config: PretrainedConfig) -> Iterator[HeadArithmetic]:
    """Yield every arithmetic with constants from the config, the simplest first.

    Constants are the positive numbers with a fractional type that the reduced copy keeps, and whole numbers in a field
    about logits.
    """
    fields, reduced = (vars(whole.get_text_config(decoder=True)) for whole in (config, small))
    constants = {
        float(value)
        for name, value in fields.items()
        if (isinstance(value, float) or ("logit" in name and isinstance(value, int) and not isinstance(value, bool)))
        and value > 0
        and reduced.get(name) == value
    }
    values = sorted(constants)
    scales = [1.0, *values, *(1 / value for value in values)]
    for softcap in (None, *values):
        yield from (HeadArithmetic(scale, softcap) for scale in scales)
