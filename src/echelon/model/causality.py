"""Tests whether a model's attention is causal by running it, because no list of model types would be complete.

A small copy of the model runs twice on the CPU, on two sequences that differ from some token on. If the logits before
that token differ, the model sees later tokens, and next-token training would leak the labels.
"""

import copy
import json
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from echelon.errors import ConfigError
from echelon.model.build import build_on_meta

# The largest reduced copy that is run; and the largest model that is run unreduced.
_MAX_PARAMETERS = 100_000_000
_SMALL_PARAMETERS = 10_000_000
_MAX_INTERMEDIATE = 64
_MAX_VOCABULARY = 256
# (whether heads are removed, number of layers kept, None for all); the first copy that is small enough and runs is
# used. Layer kinds that no list in the config names repeat at least every eight layers.
_COPIES: tuple[tuple[bool, int | None], ...] = ((True, 8), (True, 2), (True, None), (False, 2))
_LENGTH = 12
# Rounding changes earlier logits by up to 1e-6 of the largest one (experts group tokens differently); a leak changes
# them by 0.1 or more.
_TOLERANCE = 1e-4
# The config fields, with their values, that make a model causal in families where that is configurable.
_SWITCHES = (("is_decoder", True), ("causal", True), ("is_causal", True), ("use_bidirectional_attention", False))


def check_is_causal(config: PretrainedConfig, trust_remote_code: bool = False) -> None:
    """Refuse a model whose attention is not causal, and a small model whose forward pass fails.

    Takes tenths of a second, once per config and process. A model passes unchecked if no copy with at most 100 M
    parameters can be built, or if the copy does not run: a handful of architectures in `transformers` 5.

    Raises:
        ConfigError: the message names the field that would make the model causal, if there is one.
    """
    if not _sees_what_follows(_Key(config, trust_remote_code)):
        return
    fix = "use a causal family, for example llama"
    for name, value in _SWITCHES:
        if getattr(config, name, value) != value:
            changed = copy.deepcopy(config)
            setattr(changed, name, value)
            if not _sees_what_follows(_Key(changed, trust_remote_code)):
                written = json.dumps(value)
                fix = f"set {name}: {written} in model.config (for a checkpoint, in its config.json), or {fix}"
                break
    raise ConfigError(
        f"model: in this {config.model_type} model positions attend to later tokens, and next-token prediction "
        f"requires causal attention; {fix}."
    )


class _Key:
    """A config as a cache key, compared by content."""

    def __init__(self, config: PretrainedConfig, trust_remote_code: bool) -> None:
        self.config = config
        self.trust_remote_code = trust_remote_code
        self._text = json.dumps([config.model_type, config.to_dict(), trust_remote_code], default=repr, sort_keys=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=64)
def _sees_what_follows(key: _Key) -> bool:
    """Return whether a later token changes an earlier logit; False if no copy could be run.

    Raises:
        ConfigError: the model is small enough to run unreduced, and its forward pass fails.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # warnings about a reduced copy do not concern the user
    try:
        if count_parameters(build_on_meta(key.config, None, key.trust_remote_code)) <= _SMALL_PARAMETERS:
            return _try_as_is(key)
        for small in _smaller_copies(key.config):
            try:
                if count_parameters(build_on_meta(small, None, key.trust_remote_code)) <= _MAX_PARAMETERS:
                    return _try(small, key.trust_remote_code)
            except Exception:  # a reduced config may break a family's own assumptions in any way
                continue
        return False
    finally:
        logging.set_verbosity(verbosity)


def _try_as_is(key: _Key) -> bool:
    try:
        return _try(key.config, key.trust_remote_code)
    except Exception as error:  # transformers raises many types of exception
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: a forward pass of this {key.config.model_type} model fails ({type(error).__name__}: {reason}); "
            "correct model.config."
        ) from error


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model, counting tied weights once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _try(config: PretrainedConfig, trust_remote_code: bool) -> bool:
    """Return whether a later token changes an earlier logit of a model with this config.

    In a mixture of experts a rounding error can change the choice of experts, but not in both precisions.
    """
    single, double = (
        partial(_measure_leak, config, trust_remote_code, each) for each in (torch.float32, torch.float64)
    )
    if single() <= _TOLERANCE:
        return False
    try:
        return double() > _TOLERANCE
    except RuntimeError:  # a kernel without fp64
        return True


@torch.no_grad()
def _measure_leak(config: PretrainedConfig, trust_remote_code: bool, dtype: torch.dtype) -> float:
    """Return the change of the earlier logits, as a fraction of the largest one. Keeps the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        ).eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:  # initial weights are small, and some are zero
                bound = (3 / parameter.shape[-1]) ** 0.5
                parameter.uniform_(-bound, bound)
        size = model.get_input_embeddings().weight.shape[0]
        low = size // 4  # special tokens come first
        tokens = torch.randint(low, size, (1, _LENGTH))
        others = tokens.clone()
        half = _LENGTH // 2
        others[:, half:] = low + (tokens[:, half:] - low + 1) % (size - low)
    first, second = (model(input_ids=each, use_cache=False).logits[:, :half] for each in (tokens, others))
    return float((first - second).abs().max() / first.abs().max())


def _smaller_copies(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield reduced copies of the config that keep the causality of its attention, most faithful first.

    Heads keep their width and the ratio of query to key heads, so that tensors derived from the head width still fit.
    """
    for narrow, num_layers in _COPIES:
        small = copy.deepcopy(config)
        try:
            for part in _parts(small):
                _reduce_width(part)
                if narrow:
                    _reduce_heads(part)
                if num_layers is not None:
                    _reduce_layers(part, num_layers)
        except Exception:  # some configs validate changes and refuse them
            continue
        yield small


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from _parts(part)


def _count(config: PretrainedConfig, name: str) -> int | None:
    """Return a positive integer field, resolved through the family's attribute map; None if it has none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _reduce_width(config: PretrainedConfig) -> None:
    """Reduce the intermediate width of feed-forward layers, and the vocabulary."""
    vocabulary = min(_count(config, "vocab_size") or 0, _MAX_VOCABULARY)
    for name, value in list(vars(config).items()):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if ("intermediate" in name or "ffn" in name or name == "n_inner") and value > _MAX_INTERMEDIATE:
            setattr(config, name, _MAX_INTERMEDIATE)
        elif vocabulary and name.endswith("_id") and value >= vocabulary:
            setattr(config, name, 0)
    if vocabulary:
        config.vocab_size = vocabulary


def _reduce_heads(config: PretrainedConfig) -> None:
    """Keep one or two key heads with their query heads, and reduce the hidden size in proportion."""
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    if heads is None or hidden is None:
        return
    keys = _count(config, "num_key_value_heads") or heads
    kept = heads // keys * (1 if heads > keys else 2)
    if heads % keys or kept >= heads or hidden * kept % heads:
        return
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    counts = {name: count for name in names if (count := _count(config, name)) is not None}
    for name, count in counts.items():
        setattr(config, name, max(1, count * kept // heads))


def _reduce_layers(config: PretrainedConfig, wanted: int) -> None:
    """Keep `wanted` layers, and at least one of each kind that the config's per-layer lists name."""
    num_layers = _count(config, "num_hidden_layers")
    if num_layers is None or num_layers <= wanted:
        return
    lists: dict[str, list[Any]] = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == num_layers
    }
    kinds = [json.dumps([values[layer] for values in lists.values()], default=repr) for layer in range(num_layers)]
    first_of_kind = sorted({kinds.index(kind) for kind in kinds})
    others = [layer for layer in range(num_layers) if layer not in first_of_kind]
    kept = sorted([*first_of_kind, *others[: max(0, wanted - len(first_of_kind))]])
    for name, values in lists.items():
        setattr(config, name, [values[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
