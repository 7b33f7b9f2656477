"""Scales the rotary positions of a config as `model.rope` says. Does not import torch at its top."""

import math
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError
from echelon.recipe import Recipe
from echelon.recipe.inputs import RopeConfig

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_LENGTH = "original_max_position_embeddings"
# The keys that `transformers` writes for a type; of those of Llama 3.1 none has a default.
_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
}  # fmt: skip


def scale_positions(config: "PretrainedConfig", recipe: Recipe) -> None:
    """Scale the rotary positions of a config as `model.rope` says, in place; without that key do nothing.

    In a model whose kinds of layers have different positions, those of full attention are scaled: layers with a window
    never see a distance beyond it. `max_position_embeddings` becomes the scaled length; with `dynamic` it stays the
    original one, of which the formula of `transformers` makes the scale.

    Raises:
        ConfigError: the keys do not go together, the model has no rotary positions that `transformers` scales, they
            are scaled already, or `data.sequence_len` is longer than the scaled length.
    """
    rope = recipe.model.rope
    if rope is None:
        return
    _check_keys(rope)
    check_full_sequences(recipe)
    text = config.get_text_config(decoder=True)
    table = _find_table(text, f"model.rope.type={rope.type}")
    original = rope.original_max_position_embeddings
    if original is None:
        if table["rope_type"] != "default":
            raise ConfigError(
                f"model.rope.type={rope.type}: the positions of this model are scaled already (rope_type "
                f"{table['rope_type']}); remove model.rope to keep that, or replace it by setting "
                "model.rope.original_max_position_embeddings to the unscaled length."
            )
        original = int(text.max_position_embeddings)
    reach, length = int(original * rope.factor), recipe.data.sequence_len
    if length > reach:
        raise ConfigError(
            f"data.sequence_len={length} is longer than the {reach} positions that model.rope covers ({original} times "
            f"factor {rope.factor:g}); set model.rope.factor={math.ceil(length / original)}, or data.sequence_len="
            f"{reach}."
        )
    kept = set(table) - set(RopeConfig.model_fields) - {"rope_type"}
    values = {key: getattr(rope, key) for key in _KEYS[rope.type]} | {_LENGTH: original}
    stated = (*_KEYS[rope.type], *([_LENGTH] if _LENGTH in table else []))  # Ministral 3 reads it with any type
    scaled = {key: values[key] for key in stated if values[key] is not None}
    unscaled = {key: table[key] for key in kept}
    table.clear()
    table |= {**unscaled, "rope_type": rope.type, **scaled}
    text.max_position_embeddings = original if rope.type == "dynamic" else reach
    if hasattr(text, _LENGTH):  # Phi-3 has it here, and transformers prefers it
        setattr(text, _LENGTH, original)
    if getattr(text, "head_dim", 0) is None:  # Mixtral's; the formulas of transformers need a number
        text.head_dim = text.hidden_size // text.num_attention_heads


def _check_keys(rope: RopeConfig) -> None:
    """Refuse keys of another type, missing ones, and borders in the wrong order. Raises ConfigError."""
    taken = {*_KEYS[rope.type], _LENGTH}
    for key in RopeConfig.model_fields.keys() - {"type"}:
        value = getattr(rope, key)
        if value is not None and key not in taken:
            owner = next(kind for kind, keys in _KEYS.items() if key in keys)
            raise ConfigError(
                f"model.rope.{key}={value} is a key of model.rope.type={owner}, and the type is {rope.type}; remove it."
            )
        if value is None and rope.type == "llama3" and key in taken - {_LENGTH}:
            raise ConfigError(f"model.rope.{key} is missing, which model.rope.type=llama3 needs; set it.")
    slow, fast = rope.beta_slow or 1, rope.beta_fast or 32
    if slow > fast:
        raise ConfigError(f"model.rope.beta_slow={slow:g} is more than beta_fast={fast:g}; make it less.")
    low, high = rope.low_freq_factor or 0, rope.high_freq_factor or math.inf
    if low >= high:
        raise ConfigError(f"model.rope.low_freq_factor={low:g} is not below high_freq_factor={high:g}; lower it.")


def check_full_sequences(recipe: Recipe, are_apart: bool = False) -> None:
    """Refuse `dynamic` unless all sequences are full: it scales positions by the longest text of a batch.

    The loss would depend on which texts share a microbatch. `are_apart`: documents of the data are known to be.

    Raises:
        ConfigError: the message names the key that the sequences are not full by.
    """
    rope, data = recipe.model.rope, recipe.data
    if rope is None or rope.type != "dynamic":
        return
    if recipe.objective.row.answers is not None or recipe.samples_answers:
        fault = f"objective.name={recipe.objective.name} has texts of different lengths"
    elif data.packing not in ("auto", True):
        fault = "data.packing=false gives each document a sequence of its own"
    elif are_apart or data.document_mask not in ("auto", False):
        fault = "the documents of this data are kept apart (data.document_mask)"
    else:
        return
    raise ConfigError(
        f"model.rope.type=dynamic scales positions by the longest text of a batch, and {fault}; use "
        "model.rope.type=yarn, or plain text that is joined."
    )


def _find_table(text: "PretrainedConfig", named: str) -> dict[str, Any]:
    """Return the rotary parameters of a config, or of its layers with full attention. Raises ConfigError."""
    found = getattr(text, "rope_parameters", None) or {}
    has, nested = "no rotary positions", [kind for kind, value in found.items() if isinstance(value, dict)]
    if nested:
        found = found.get("full_attention") or {}
        has = f"rotary positions in {' and '.join(nested)} alone"
    kind = found.get("rope_type") if hasattr(text, "max_position_embeddings") else None
    if kind not in ("default", *_KEYS):
        has = has if kind is None else f"rotary positions of the type {kind}"
        raise ConfigError(f"{named}: a {text.model_type} model has {has}, which cannot be scaled; remove model.rope.")
    table: dict[str, Any] = found
    return table


def check_scaled(model: "nn.Module", recipe: Recipe) -> None:
    """Raise ConfigError unless a model, on meta or not, computes the positions that `model.rope` asks for."""
    rope = recipe.model.rope
    if rope is None:
        return
    computed: set[str] = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", ())  # a name, or one for each kind of layer
        computed |= {kinds} if isinstance(kinds, str) else set(kinds.values() if isinstance(kinds, dict) else ())
    if rope.type not in computed:
        raise ConfigError(
            f"model.rope.type={rope.type}: {type(model).__name__} with this config computes no such positions; remove "
            "model.rope, or use another model."
        )
