"""What expert parallelism needs of a model: numbers that divide, and experts that are stored in stacked weights."""

from typing import TYPE_CHECKING

from echelon.errors import ConfigError
from echelon.planner.degrees import join_words, nearest
from echelon.planner.layout import Layout
from echelon.planner.model_shape import ModelShape, divisors

if TYPE_CHECKING:
    from echelon.recipe import Recipe


def check_expert_parallel(recipe: "Recipe", shape: ModelShape, layout: Layout) -> None:
    """Raise ConfigError if the experts of a model cannot be divided as a layout wants, with degrees that fit."""
    ep, efsdp = layout.ep, layout.dp_shard * layout.cp // layout.ep
    if ep == 1:
        return
    if not shape.experts:
        raise ConfigError(
            f"parallel.ep={ep}: {shape.model_type} has no experts in stacked weights [experts, rows, columns], so "
            "there is nothing to divide; remove parallel.ep."
        )
    num_experts = min(each.num_experts for each in shape.experts)
    fits = [degree for degree in divisors(layout.dp_shard * layout.cp) if num_experts % degree == 0]
    if num_experts % ep:
        raise ConfigError(
            f"parallel.ep={ep} does not divide the {num_experts} experts of the model; use ep = "
            f"{join_words([str(degree) for degree in nearest(fits, ep)])}."
        )
    for each in shape.experts:
        if each.rows % efsdp:
            raise ConfigError(
                f"parallel.ep={ep} leaves {efsdp} processes to share each expert, which do not divide the {each.rows} "
                f"rows of {each.name}; use a larger ep, or fewer processes in dp_shard."
            )
    if layout.tp > 1:
        raise ConfigError(
            f"parallel.ep={ep} and parallel.tp={layout.tp} would both divide the experts; use one of them."
        )
    adapter = recipe.adapter
    key = "target_parameters" if adapter.target_parameters else "quantize_experts" if adapter.quantize_experts else None
    if key is not None:
        raise ConfigError(
            f"parallel.ep={ep} does not work with adapter.{key}: PEFT wraps the experts and replaces their weights in "
            f"each forward pass; remove adapter.{key} to adapt linear layers alone, or parallel.ep."
        )
