"""What tensor parallelism cannot divide, refused with the degrees that fit."""

import math
from typing import TYPE_CHECKING

from echelon.errors import ConfigError, PlanError
from echelon.planner.degrees import join_words, nearest
from echelon.planner.layout import Layout
from echelon.planner.model_shape import ModelShape, divisors

if TYPE_CHECKING:
    from echelon.recipe import Recipe


def check_tensor_parallel(recipe: "Recipe", shape: ModelShape, layout: Layout) -> None:
    """Refuse a degree that does not divide the model, and recipes that divided layers do not support.

    Raises:
        PlanError: the degree does not divide the heads, the MLP, the vocabulary or, with sequence parallelism, the
            sequence; the message has degrees that do.
        ConfigError: a setting that no degree above 1 supports.
    """
    if layout.tp == 1:
        return
    _check_sizes(recipe, shape, layout)
    _check_settings(recipe, shape, layout.tp)


def _check_sizes(recipe: "Recipe", shape: ModelShape, layout: Layout) -> None:
    sizes = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
    }
    if shape.expert_widths[0] < 1:
        sizes["intermediate_size"] = shape.intermediate_size
    if shape.experts:
        sizes["the number of experts" + (f" / {layout.ep}" if layout.ep > 1 else "")] = (
            shape.experts[0].num_experts // layout.ep
        )
    if layout.sequence_parallel:
        chunks = 2 * layout.cp if layout.cp > 1 else 1
        sizes["data.sequence_len" + (f" / {chunks}" if chunks > 1 else "")] = recipe.data.sequence_len // chunks
    failing = {name: size for name, size in sizes.items() if size % layout.tp}
    if failing:
        name, size = next(iter(failing.items()))
        fits = join_words([str(n) for n in nearest(divisors(math.gcd(*sizes.values())), layout.tp)])
        hint = " or set model.config.vocab_size to a multiple" if [*failing] == ["vocab_size"] else ""
        raise PlanError(f"parallel.tp={layout.tp} does not divide {name}={size}; use tp = {fits}{hint}.")


def _check_settings(recipe: "Recipe", shape: ModelShape, tp: int) -> None:
    adapter, parts, has_adapter = recipe.adapter, shape.parts, recipe.adapter.is_adapter
    dropout = "each rank would drop other values; set it to 0"
    obstacles = [
        (parts.attention_dropout + parts.residual_dropout, "a model with attention or residual dropout", dropout),
        (has_adapter and adapter.dropout, f"adapter.dropout={adapter.dropout}", dropout),
        (adapter.method == "qlora", "adapter.method=qlora", "its 4-bit blocks are those of whole matrices; use lora"),
        (has_adapter and adapter.init == "pissa", "adapter.init=pissa", "it decomposes whole matrices; use default"),
        (has_adapter and adapter.modules_to_save, "adapter.modules_to_save", "these modules are divided; remove it"),
        (has_adapter and recipe.model.new_tokens, "model.new_tokens of an adapter", "the embedding is divided"),
        (recipe.optim.name == "adamw_8bit", "optim.name=adamw_8bit", "its blocks are of whole rows; use adamw"),
        (recipe.train.precision == "fp8", "train.precision=fp8", "its scales are those of whole matrices; use bf16"),
    ]  # fmt: skip
    for is_used, what, why in obstacles:
        if is_used:
            raise ConfigError(f"parallel.tp={tp} does not work with {what}: {why}, or use tp=1.")
