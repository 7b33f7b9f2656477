"""Small copies of a model, on which its properties are tested: no list of model types would be complete.

A copy has the model's class and the fields of its config, with fewer layers, heads and experts' units, and random
weights.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import logging
from typing_extensions import override

# The largest reduced copy that is run; and the largest model that is run unreduced.
MAX_PARAMETERS = 100_000_000
SMALL_PARAMETERS = 10_000_000
_MAX_INTERMEDIATE = 64
_MAX_EXPERT = 16  # the width of an expert, of which each token reads several
_MAX_VOCABULARY = 256
# (groups of heads that are kept, None for all; number of layers kept, None for all); the first copy that is small
# enough and runs is used. Layer kinds that no list in the config names repeat at least every eight layers.
_COPIES: tuple[tuple[int | None, int | None], ...] = ((1, 8), (1, 2), (1, None), (None, 2))


@contextmanager
def transformers_silenced() -> Iterator[None]:
    """Silence the warnings that `transformers` logs, which concern the copy and not the user's model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


class ConfigKey:
    """A config as a cache key, compared by content."""

    def __init__(self, config: PretrainedConfig, *others: Any) -> None:
        """`others`: what else the cached value depends on; compared by their JSON."""
        self.config = config
        self.others = others
        self._text = json.dumps([config.model_type, config.to_dict(), *others], default=repr, sort_keys=True)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigKey) and self._text == other._text

    @override
    def __hash__(self) -> int:
        return hash(self._text)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model, counting tied weights once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Give every matrix weights that keep the size of its input: initial weights are small, and some are zero."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            bound = (3 / parameter.shape[-1]) ** 0.5
            parameter.uniform_(-bound, bound)


def random_tokens(model: Any, *shape: int) -> Tensor:
    """Return random token ids of the upper three quarters of the vocabulary: special tokens come first."""
    size = model.get_input_embeddings().weight.shape[0]
    return torch.randint(size // 4, size, shape)


def other_tokens(model: Any, tokens: Tensor) -> Tensor:
    """Return other tokens at every place, from the same part of the vocabulary as `random_tokens`."""
    size: int = model.get_input_embeddings().weight.shape[0]
    low: int = size // 4
    return low + (tokens - low + 1) % (size - low)


def smaller_copies(config: PretrainedConfig, widen: int = 1) -> Iterator[PretrainedConfig]:
    """Yield reduced copies of the config that keep the kinds of its layers, most faithful first.

    Heads keep their width and the ratio of query to key heads, so that tensors derived from the head width still fit.

    Args:
        widen: the factor on the number of heads that are kept.
    """
    for groups, num_layers in _COPIES:
        small = copy.deepcopy(config)
        try:
            for part in config_parts(small):
                _reduce_width(part)
                if groups is not None:
                    _reduce_heads(part, groups * widen)
                if num_layers is not None:
                    _reduce_layers(part, num_layers)
        except Exception:  # some configs validate changes and refuse them
            continue
        yield small


def shallow_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of the config with one layer of each kind and a small vocabulary; widths stay."""
    shallow = copy.deepcopy(config)
    for part in config_parts(shallow):
        _reduce_vocabulary(part)
        _reduce_layers(part, 1)
    return shallow


def config_parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a config and those inside it."""
    yield config
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from config_parts(part)


def _count(config: PretrainedConfig, name: str) -> int | None:
    """Return a positive integer field, resolved through the family's attribute map; None if it has none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _reduce_width(config: PretrainedConfig) -> None:
    """Reduce the intermediate width of feed-forward layers, and the vocabulary."""
    for name, value in list(vars(config).items()):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and ("intermediate" in name or "ffn" in name or name == "n_inner"):
            setattr(config, name, min(value, _MAX_EXPERT if "moe" in name else _MAX_INTERMEDIATE))
    _reduce_vocabulary(config)


def _reduce_vocabulary(config: PretrainedConfig) -> None:
    vocabulary = min(_count(config, "vocab_size") or 0, _MAX_VOCABULARY)
    if not vocabulary:
        return
    for name, value in list(vars(config).items()):
        if name.endswith("_id") and isinstance(value, int) and not isinstance(value, bool) and value >= vocabulary:
            setattr(config, name, 0)
    config.vocab_size = vocabulary


def _reduce_heads(config: PretrainedConfig, groups: int) -> None:
    """Keep `groups` key heads with their query heads, and reduce the hidden size in proportion.

    Twice as many if each query head has a key head of its own.
    """
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    if heads is None or hidden is None:
        return
    keys = _count(config, "num_key_value_heads") or heads
    kept = heads // keys * groups * (1 if heads > keys else 2)
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
