"""Forward passes over new tokens alone, with the keys and values that attention has kept of the tokens before.

There is no list of model types: a cache is used if, on a small copy, such passes have the logits of whole sequences.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from echelon.learn.model.attention import PADDED, choose_attention, stand_in
from echelon.learn.model.context_attention import find_attention
from echelon.learn.model.small_copy import ConfigKey, config_parts, random_tokens
from echelon.learn.model.traits import build_copies, is_close, run_copy, undisturbed

Advance = Callable[[Tensor, Tensor], Tensor]
"""Reads the next tokens [rows, new] of some sequences, and which of them are tokens and not padding (boolean, of the
same shape). Returns the fp32 logits [rows, vocabulary] of the token that follows each row."""

Run = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""Runs a pass over ids [rows, new], which is a function without arguments, and returns its logits."""


def _run(input_ids: Tensor, run: Callable[[], Tensor]) -> Tensor:
    return run()


# What a model calls its cache, as an argument and in its outputs: it depends on the family and on the release.
_NAMES = ("cache", "past_key_values", "cache_params")
# Lengths of the prompts of the test, which continues them beyond the window of a copy.
_PROMPTS = (7, 3, 5)
_NEW = 6
# Layers whose keys and values are kept in buffers, in which there is room for so many more tokens.
_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)
_ROOM = 32


class KeyValueCache:
    """The keys and values of some rows of tokens. It is an `Advance`; the first pass reads prompts, padded on the left.

    In its passes the model runs uncompiled, because each has another length, and with an attention of `transformers`
    itself, which obeys padding and computes the same up to rounding. Then the model is as it was.
    """

    moves_rows: bool
    """Whether `select` and `join` may be called."""

    def __init__(self, model: PreTrainedModel, multiple: int = 1, run: Run = _run, moves_rows: bool = True) -> None:
        """See `start_cache`. `multiple`: the passes are padded, and the cache is cut again."""
        self.moves_rows = moves_rows
        self._model = model
        self._multiple = multiple
        self._run = run
        self._accepts = inspect.signature(model.forward).parameters.keys()
        self._attention = _find_padded_attention(model)
        self._filled = torch.empty(0)
        self._past: dict[str, Any] = {}

    def empty(self) -> Self:
        """Return an empty cache for other rows of the same model."""
        other = copy.copy(self)
        other._past = {}
        return other

    def __call__(self, input_ids: Tensor, filled: Tensor) -> Tensor:
        """Run the model over new tokens; see `Advance`. Collective where the model is divided.

        Raises:
            ValueError: the model returned no cache.
        """
        return self._run(input_ids, lambda: self._pass(input_ids, filled))

    def _pass(self, input_ids: Tensor, filled: Tensor) -> Tensor:
        seen = torch.cat([self._filled, filled], 1) if self._past else filled
        new, extra = input_ids.shape[1], -input_ids.shape[1] % self._multiple
        # Attention is causal, so nothing that is kept depends on the padding at the end.
        mask = pad(seen, (0, extra)).long()
        inputs = {
            "input_ids": pad(input_ids, (0, extra)),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -new - extra :],
            "logits_to_keep": 1 + extra,
            "use_cache": True,
        }
        taken = {name: value for name, value in inputs.items() if name in self._accepts}
        if self._past and "position_ids" not in self._accepts:
            del taken["attention_mask"]  # a recurrent state has read the padding already
        with _using(self._model.config, self._attention), torch.compiler.set_stance("force_eager"):
            outputs = self._model(**taken, **self._past)
        self._filled = seen
        names = [name for name in _NAMES if name in self._accepts and getattr(outputs, name, None) is not None]
        if not names:
            raise ValueError("its forward pass returns no cache")
        cache = getattr(outputs, names[0])
        if not self._past:
            for layer in getattr(cache, "layers", ()):
                if type(layer) in _KINDS:
                    layer.update = partial(_update, layer)
        if extra:
            cache.crop(-extra)
        self._past = {names[0]: cache}
        logits: Tensor = outputs.logits[:, -1 - extra]
        return logits.float()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order, and the positions that one of them needs. A row may occur more than once."""
        [cache] = self._past.values()
        cache.reorder_cache(rows)
        self._filled = self._filled[rows]
        self._widen(-int(self._filled.any(0).long().argmax()))

    def join(self, other: "KeyValueCache") -> None:
        """Append the rows of another cache of this model, which is then of no use any more.

        Raises:
            TypeError: the cache of a layer is of a kind whose rows cannot be put together.
        """
        difference = self._filled.shape[1] - other._filled.shape[1]
        self._widen(max(0, -difference))
        other._widen(max(0, difference))
        for layer, joining in zip(self.layers(), other.layers(), strict=True):
            layer.keys = torch.cat([layer.keys, joining.keys])
            layer.values = torch.cat([layer.values, joining.values])
        self._filled = torch.cat([self._filled, other._filled])

    def _widen(self, count: int) -> None:
        """Add so many positions of padding on the left, or remove them; `transformers` cuts on the right alone."""
        if not count:
            return
        self._filled = pad(self._filled, (count, 0))
        for layer in self.layers():
            width = self._filled.shape[1]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = width
                width = min(width, layer.sliding_window - 1)
            more = width - layer.keys.shape[-2]
            layer.keys, layer.values = (pad(tensor, (0, 0, more, 0)) for tensor in (layer.keys, layer.values))

    def layers(self) -> list[Any]:
        """What the cache keeps of each layer. Raises TypeError if that is more than keys and values."""
        [cache] = self._past.values()
        if not all(type(layer) in _KINDS for layer in cache.layers):
            raise TypeError(f"{cache} has layers with more than keys and values")
        return list(cache.layers)


def _update(layer: Any, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """What the `update` of a layer does, without a copy of all that it has kept: append, and return all."""
    whole = _append(layer.keys, key_states), _append(layer.values, value_states)
    layer.keys, layer.values = whole
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length += key_states.shape[-2]
        layer.keys, layer.values = (part[:, :, 1 - layer.sliding_window :] for part in whole)
    return whole


def _append(kept: Tensor, new: Tensor) -> Tensor:
    """Return kept [rows, heads, seq, width] and new, one behind the other: in the buffer of which `kept` is a part.

    If `kept` is no part of a buffer, or that is full, both are copied to another with room for `_ROOM` tokens more.
    """
    buffer, length, size = kept._base, kept.shape[-2], new.shape[-2]
    start = kept.storage_offset() // max(1, kept.stride(-2))
    if buffer is None or buffer.stride() != kept.stride() or start + length + size > buffer.shape[-2]:
        buffer, start = kept.new_empty(*kept.shape[:2], length + size + _ROOM, kept.shape[-1]), 0
        buffer[:, :, :length] = kept
    buffer[:, :, start + length : start + length + size] = new
    return buffer[:, :, start : start + length + size]


def start_cache(
    model: PreTrainedModel, multiple: int = 1, run: Run = _run, is_equal: bool = False
) -> KeyValueCache | None:
    """Return an empty cache for passes of a model; None if such passes compute something else than whole sequences do.

    Args:
        multiple: the width of a pass must be one of this.
        run: what is needed around a pass.
        is_equal: ranks need batches of equal shapes, so rows must not move.
    """
    if not can_cache(model, multiple):
        return None
    return KeyValueCache(model, multiple, run, not is_equal and can_move_rows(model, multiple))


def can_cache(model: PreTrainedModel, multiple: int = 1) -> bool:
    """Whether passes with a `KeyValueCache` compute what passes over whole sequences do; once per config and process.

    By a small copy on the CPU. The model may be on meta, divided or with an adapter. Keeps the global random state.

    Args:
        multiple: see start_cache.
    """
    return _is_same(_key(model, multiple), continue_rows)


def can_move_rows(model: PreTrainedModel, multiple: int = 1) -> bool:
    """Whether they also do when rows have left the cache and others have joined; see `can_cache`."""
    return _is_same(_key(model, multiple), move_rows)


def _key(model: PreTrainedModel, multiple: int) -> ConfigKey:
    return ConfigKey(model.config, type(model), stand_in(find_attention(model)), multiple)


@lru_cache(maxsize=64)
def _is_same(key: ConfigKey, walk: Callable[["RandomRows"], bool]) -> bool:
    """Whether a walk finds the logits of whole rows, with small copies of a model."""
    model_class, attention, multiple = key.others
    with undisturbed():
        try:
            copies = build_copies(model_class, key.config, attention, None)
            return all(walk(RandomRows(model, KeyValueCache(model, multiple))) for model in copies)
        except Exception:  # a family may fail in any way
            return False


class RandomRows:
    """Random rows of tokens, which a copy reads whole, and a cache in parts."""

    def __init__(self, model: PreTrainedModel, cache: KeyValueCache) -> None:
        self.cache = cache
        self._rows = [random_tokens(model, 1, length + _NEW) for length in _PROMPTS]
        self._device = model.device
        self._whole = [run_copy(model, row.to(self._device))[0].cpu() for row in self._rows]

    def read(self, cache: KeyValueCache, numbers: Sequence[int], ends: Sequence[int], size: int | None = 1) -> bool:
        """Read the tokens of some rows up to an end of each: the last `size`, or all. Whether the logits are right."""
        parts = [self._rows[number][0, :end][-(size or end) :] for number, end in zip(numbers, ends, strict=True)]
        width = max(map(len, parts))
        new = torch.stack([pad(part, (width - len(part), 0)) for part in parts])
        filled = torch.arange(width) >= width - torch.tensor([[len(part)] for part in parts])
        expected = [self._whole[number][end - 1] for number, end in zip(numbers, ends, strict=True)]
        return is_close(cache(new.to(self._device), filled.to(self._device)).cpu(), torch.stack(expected))


def continue_rows(rows: RandomRows) -> bool:
    """Continue prompts of different lengths token by token."""
    return all(
        rows.read(rows.cache, (0, 1, 2), [length + step for length in _PROMPTS], 1 if step else None)
        for step in range(_NEW)
    )


def move_rows(rows: RandomRows) -> bool:
    """Continue a prompt twice, after it a longer one, without the first a shorter one."""
    cache, longer, shorter = rows.cache, rows.cache.empty(), rows.cache.empty()
    (long, short, middle), is_same = _PROMPTS, True
    is_same &= rows.read(cache, (1, 2), (short, middle), None)
    cache.select(torch.tensor([1, 0, 1]))
    is_same &= rows.read(cache, (2, 1, 2), (middle + 1, short + 1, middle + 1))
    is_same &= rows.read(longer, (0,), (long,), None)
    cache.join(longer)
    for step in (1, 2):
        ends = (middle + 1 + step, short + 1 + step, middle + 1 + step, long + step)
        is_same &= rows.read(cache, (2, 1, 2, 0), ends)
    cache.select(torch.tensor([1, 0]))
    is_same &= rows.read(shorter, (1,), (short,), None)
    cache.join(shorter)
    for step in (1, 2):
        is_same &= rows.read(cache, (1, 2, 1), (short + 3 + step, middle + 3 + step, short + step))
    return is_same


def _find_padded_attention(model: PreTrainedModel) -> str:
    """The attention of `transformers` for which it builds masks of padded rows, and which computes this model."""
    is_eager = find_attention(model) == "eager" or not model._supports_sdpa
    plain = PADDED if model.device.type == "cuda" else "sdpa"
    return "eager" if is_eager else choose_attention(model.config, None) or plain


@contextmanager
def _using(config: PretrainedConfig, attention: str) -> Iterator[None]:
    """Scope in which a model with this config uses another attention implementation."""
    before = [(part, part._attn_implementation_internal) for part in config_parts(config)]
    for part, _ in before:
        part._attn_implementation_internal = attention
    try:
        yield
    finally:
        for part, name in before:
            part._attn_implementation_internal = name
