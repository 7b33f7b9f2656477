"""Forward passes over new tokens alone, with the keys and values that attention has kept of the tokens before.

There is no list of model types: a cache is used if, on a small copy, such passes have the logits of whole sequences.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from echelon.learn.model.attention import choose_attention, stand_in
from echelon.learn.model.context_attention import find_attention
from echelon.learn.model.small_copy import ConfigKey, config_parts, random_tokens
from echelon.learn.model.traits import build_copies, is_close, run_copy, undisturbed

Advance = Callable[[Tensor, Tensor], Tensor]
"""Reads the next tokens [rows, new] of some sequences, and which of them are tokens and not padding (boolean, of the
same shape). Returns the fp32 logits [rows, vocabulary] of the token that follows each row."""

# What a model calls its cache, as an argument and in its outputs: it depends on the family and on the release.
_NAMES = ("cache", "past_key_values", "cache_params")
# Lengths of the prompts of the test, which continues them beyond the window of a copy.
_PROMPTS = (7, 3, 5)
_NEW = 6


class KeyValueCache:
    """The keys and values of some rows of tokens. It is an `Advance`; the first pass reads prompts, padded on the left.

    In its passes the model runs uncompiled, because each has another length, and with an attention of `transformers`
    itself, which obeys padding and computes the same up to rounding. Then the model is as it was.
    """

    def __init__(self, model: PreTrainedModel, multiple: int = 1) -> None:
        """`multiple`: the width of a pass must be one of this; the passes are padded, and the cache is cut again."""
        self._model = model
        self._multiple = multiple
        self._accepts = inspect.signature(model.forward).parameters.keys()
        self._attention = _find_padded_attention(model)
        self._filled: Tensor | None = None
        self._past: dict[str, Any] = {}

    def __call__(self, input_ids: Tensor, filled: Tensor) -> Tensor:
        """Run the model over new tokens; see `Advance`. Collective where the model is divided.

        Raises:
            ValueError: the model returned no cache.
        """
        seen = filled if self._filled is None else torch.cat([self._filled, filled], 1)
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
        if extra:
            cache.crop(-extra)
        self._past = {names[0]: cache}
        logits: Tensor = outputs.logits[:, -1 - extra]
        return logits.float()


def can_cache(model: PreTrainedModel, multiple: int = 1) -> bool:
    """Whether passes with a `KeyValueCache` compute what passes over whole sequences do; once per config and process.

    By a small copy on the CPU. The model may be on meta, divided or with an adapter. Keeps the global random state.

    Args:
        multiple: see KeyValueCache.
    """
    return _can_cache(ConfigKey(model.config, type(model), stand_in(find_attention(model)), multiple))


@lru_cache(maxsize=64)
def _can_cache(key: ConfigKey) -> bool:
    model_class, attention, multiple = key.others
    with undisturbed():
        try:
            return all(
                _is_same_with_cache(copy, multiple) for copy in build_copies(model_class, key.config, attention, None)
            )
        except Exception:  # a family may fail in any way
            return False


def _is_same_with_cache(model: PreTrainedModel, multiple: int) -> bool:
    """Whether prompts of different lengths, continued token by token, have the logits of whole sequences."""
    rows = [random_tokens(model, 1, length + _NEW) for length in _PROMPTS]
    whole = [run_copy(model, row)[0] for row in rows]
    width, cache = max(_PROMPTS), KeyValueCache(model, multiple)
    for place in range(_NEW):
        if place == 0:
            new = torch.cat([pad(row[:, :size], (width - size, 0)) for row, size in zip(rows, _PROMPTS, strict=True)])
            filled = torch.arange(width) >= width - torch.tensor(_PROMPTS)[:, None]
        else:
            new = torch.cat([row[:, size + place - 1, None] for row, size in zip(rows, _PROMPTS, strict=True)])
            filled = torch.ones_like(new, dtype=torch.bool)
        found = cache(new, filled)
        expected = [logits[size + place - 1] for logits, size in zip(whole, _PROMPTS, strict=True)]
        if not is_close(found, torch.stack(expected)):
            return False
    return True


def _find_padded_attention(model: PreTrainedModel) -> str:
    """The attention of `transformers` for which it builds masks of padded rows, and which computes this model."""
    is_eager = find_attention(model) == "eager" or not model._supports_sdpa
    return "eager" if is_eager else choose_attention(model.config, None) or "sdpa"


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
