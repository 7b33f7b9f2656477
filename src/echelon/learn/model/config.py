"""Builds the HF config of `model.config`, and scales its positions as `model.rope` says. No torch at its top."""

import difflib
import logging
import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError
from echelon.planner.shape import check_depth
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import ROPE_TYPES

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


# Legacy field names that `transformers` still accepts although its config classes no longer declare them.
_OLDER_FIELDS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "attn_implementation")


def build_config(fields: Mapping[str, Any]) -> "PretrainedConfig":
    """Build the HF config of `model.config`; omitted fields take the defaults of `transformers`.

    Raises:
        ConfigError: the model type is unknown, it has no such field, or it rejects the value.
    """
    from transformers import AutoConfig

    options = dict(fields)
    check_depth(options)
    model_type = options.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **options)
        _refuse_unknown_fields(model_type, options, AutoConfig.for_model(model_type))
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many types of exception
        reason = " ".join(str(error).split())[:500]
        raise ConfigError(f"model.config is not a valid {model_type} config: {reason}") from error
    return config


def _refuse_unknown_fields(model_type: str, fields: Mapping[str, Any], default: "PretrainedConfig") -> None:
    """Refuse misspelt fields: `transformers` accepts any field, so the intended one would silently keep its default."""
    import transformers

    names = {*vars(default), *dir(type(default)), *default.attribute_map, *_OLDER_FIELDS, *_find_read_fields(default)}
    for name in fields:
        if name not in names:
            close = difflib.get_close_matches(name, [key for key in names if not key.startswith("_")], n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it."
            raise ConfigError(
                f"model.config.{name}={fields[name]!r:.80} is not a field of a {model_type} config in transformers "
                f"{transformers.__version__}; {hint}"
            )


def _find_read_fields(default: "PretrainedConfig") -> set[str]:
    """Return the fields that a model reads where a config has them, although its config class does not declare them.

    For example `head_dim` of Qwen3-MoE. They are looked up in the text of the model's code: importing it would import
    torch.
    """
    spec = find_spec(type(default).__module__.replace(".configuration_", ".modeling_"))
    if spec is None or spec.origin is None:
        return set()
    return set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', Path(spec.origin).read_text()))


_LENGTH = "original_max_position_embeddings"
# The fields of a scale that a new one replaces. The others belong to the model, such as `rope_theta`.
_SCALE = {
    "rope_type", "type", "factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "low_freq_factor", "high_freq_factor",
}  # fmt: skip


def scale_positions(config: "PretrainedConfig", recipe: Recipe) -> None:
    """Scale the rotary positions of a config as `model.rope` says, in place; without that key do nothing.

    In a model whose kinds of layers have different positions, those of full attention are scaled: layers with a window
    never see a distance beyond it. `max_position_embeddings` becomes the scaled length; with `dynamic` it stays the
    original one, of which the formula of `transformers` makes the scale.

    Raises:
        ConfigError: `transformers` refuses the fields, the model has no rotary positions that it scales, they are
            scaled already, or `data.sequence_len` is longer than the scaled length.
    """
    rope = recipe.model.rope
    if rope is None:
        return
    check_full_sequences(recipe)
    fields = {key: float(value) if type(value) is int and key != _LENGTH else value for key, value in rope.items()}
    kind, text = rope["rope_type"], config.get_text_config(decoder=True)
    table = _find_table(text, f"model.rope.rope_type={kind}")
    original = int(fields.pop(_LENGTH, None) or _find_unscaled(text, table, kind))
    reach = _find_reach(recipe, original, fields["factor"])
    if kind in ("yarn", "llama3") or _LENGTH in table:  # Ministral 3 reads it with any type
        fields[_LENGTH] = original
    unscaled = {key: value for key, value in table.items() if key not in _SCALE}
    table.clear()
    table |= unscaled | {key: value for key, value in fields.items() if value is not None}
    text.max_position_embeddings = original if kind == "dynamic" else reach
    if hasattr(text, _LENGTH):  # Phi-3 has it here, and transformers prefers it
        setattr(text, _LENGTH, original)
    if getattr(text, "head_dim", 0) is None:  # Mixtral's; the formulas of transformers need a number
        text.head_dim = text.hidden_size // text.num_attention_heads
    _validate(text, rope)


def _find_unscaled(text: "PretrainedConfig", table: Mapping[str, Any], kind: str) -> int:
    """Return the tokens that the unscaled positions of a model reach. Raises ConfigError if they are scaled already."""
    if table["rope_type"] != "default":
        raise ConfigError(
            f"model.rope.rope_type={kind}: the positions of this model are scaled already (rope_type "
            f"{table['rope_type']}); remove model.rope to keep that, or replace it by setting "
            "model.rope.original_max_position_embeddings to the unscaled length."
        )
    return int(text.max_position_embeddings)


def _find_reach(recipe: Recipe, original: int, factor: float) -> int:
    """Return the tokens that the scaled positions reach. Raises ConfigError if sequences are longer."""
    reach, length = int(original * factor), recipe.data.sequence_len
    if length > reach:
        raise ConfigError(
            f"data.sequence_len={length} is longer than the {reach} positions that model.rope covers ({original} times "
            f"factor {factor:g}); set model.rope.factor={math.ceil(length / original)}, or data.sequence_len={reach}."
        )
    return reach


def _validate(text: "PretrainedConfig", rope: Mapping[str, Any]) -> None:
    """Raise ConfigError for what `transformers` refuses or warns of: keys of another type, missing ones."""
    told: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("transformers.modeling_rope_utils")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        text.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        told.insert(0, str(error.args[0]))
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
    ours = ("Missing", *(rope.keys() - {"rope_type", _LENGTH}))
    # The factor may differ from that of the lengths, which are rounded.
    faults = [line for line in told if any(word in line for word in ours) and "RoPE scaling factor" not in line]
    if faults:
        raise ConfigError(f"model.rope={dict(rope)}: {faults[0]}; correct it.")


def check_full_sequences(recipe: Recipe, are_apart: bool = False) -> None:
    """Refuse `dynamic` unless all sequences are full: it scales positions by the longest text of a batch.

    The loss would depend on which texts share a microbatch. `are_apart`: documents of the data are known to be.

    Raises:
        ConfigError: the message names the key that the sequences are not full by.
    """
    rope, data = recipe.model.rope, recipe.data
    if rope is None or rope["rope_type"] != "dynamic":
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
        f"model.rope.rope_type=dynamic scales positions by the longest text of a batch, and {fault}; use "
        "model.rope.rope_type=yarn, or plain text that is joined."
    )


def _find_table(text: "PretrainedConfig", named: str) -> dict[str, Any]:
    """Return the rotary parameters of a config, or of its layers with full attention. Raises ConfigError."""
    parameters = getattr(text, "rope_parameters", None) or {}
    has, nested = "no rotary positions", [kind for kind, value in parameters.items() if isinstance(value, dict)]
    if nested:
        parameters = parameters.get("full_attention") or {}
        has = f"rotary positions in {' and '.join(nested)} alone"
    kind = parameters.get("rope_type") if hasattr(text, "max_position_embeddings") else None
    if kind not in ("default", *ROPE_TYPES):
        has = has if kind is None else f"rotary positions of the type {kind}"
        raise ConfigError(f"{named}: a {text.model_type} model has {has}, which cannot be scaled; remove model.rope.")
    table: dict[str, Any] = parameters
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
    if rope["rope_type"] not in computed:
        raise ConfigError(
            f"model.rope.rope_type={rope['rope_type']}: {type(model).__name__} with this config computes no such "
            "positions; remove model.rope, or use another model."
        )
