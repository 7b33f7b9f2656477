"""The shape of a Hugging Face config dict, without a model in memory.

Known dense families are counted by formula (`families.py`), so torch is not needed; any other model type is built once
on the meta device (`count_on_meta.py`).
"""

from collections.abc import Mapping
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.planner.families import FAMILIES, ConfigFields, count_decoder, count_gpt2
from echelon.planner.model_shape import ModelShape, count_scores

MAX_LAYERS = 2000
VOCAB_MULTIPLE = 64  # an automatic vocabulary size is rounded up to a multiple of this, for the matmul kernels


def build_shape(config: Mapping[str, Any], has_adapter: bool = True) -> ModelShape:
    """Shape of the model a Hugging Face config dict describes; `has_adapter` as in `measure_shape`.

    Raises ConfigError with the wrong key of `model.config`, and PlanError if a model type outside the known families
    is used and torch is not installed.
    """
    check_depth(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            f"model.config.model_type={model_type!r:.80}: a config needs a model type; add for example "
            f"`model_type: llama`. Counted by formula: {', '.join(FAMILIES)}, gpt2."
        )
    if model_type == "gpt2":
        shape = count_gpt2(config)
    elif model_type in FAMILIES:
        shape = count_decoder(config, FAMILIES[model_type])
    else:
        from echelon.planner.count_on_meta import measure_shape  # imports torch

        shape = measure_shape(config, has_adapter)
    scores = count_scores(config)
    return shape if scores is None else shape.with_score_head(scores)


def check_depth(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an absurd number of layers: building them, even on the meta device, would take too long."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_depth(value)
        elif str(key).endswith(("layers", "n_layer")) and isinstance(value, int | float) and value > MAX_LAYERS:
            raise ConfigError(f"model.config.{key}={value:g} is more than a model can have; use {MAX_LAYERS} or less.")


def resolve_vocab_size(
    config: Mapping[str, Any], tokenizer_vocab_size: int, source: str = "model.config", may_grow: bool = False
) -> tuple[int, str]:
    """(vocabulary size of the model, line to print) for a config and the number of ids its tokenizer can emit.

    `source` is the origin of the config, for messages. A checkpoint's vocabulary changes only if it `may_grow`, by
    `model.new_tokens`. Raises ConfigError if the config's vocabulary is smaller than the number of tokenizer ids.
    """
    configured = config.get("vocab_size")
    if configured is None:
        size = -(-tokenizer_vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        more = f" {tokenizer_vocab_size} rounded up to a multiple of {VOCAB_MULTIPLE}" * (size > tokenizer_vocab_size)
        return size, f"vocab_size {size}: the tokenizer's{more}"
    size = ConfigFields(config, {}).count("vocab_size")
    if size < tokenizer_vocab_size:
        if may_grow:
            return tokenizer_vocab_size, f"vocab_size {tokenizer_vocab_size}: grown from the checkpoint's {size}"
        if source != "model.config":
            raise ConfigError(
                f"{source} has a vocabulary of {size}, smaller than the tokenizer's {tokenizer_vocab_size} ids; remove "
                "the key tokenizer to use the checkpoint's own, use a smaller tokenizer, or list the added tokens in "
                "model.new_tokens."
            )
        raise ConfigError(
            f"model.config.vocab_size={size} is smaller than the tokenizer's {tokenizer_vocab_size} ids; "
            f"use {tokenizer_vocab_size} or more, or omit it."
        )
    return size, f"vocab_size {size}: as configured; the tokenizer has {tokenizer_vocab_size} ids"
