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
    ep, tp = layout.ep, layout.tp
    if ep > 1:
        _check_degree(shape, layout)
    elif tp == 1 or not shape.experts:
        return
    key, ranks = f"parallel.ep={ep}" if ep > 1 else f"parallel.tp={tp}", layout.dp_shard * layout.cp // ep
    for each in shape.experts:
        if each.rows % ranks:
            raise ConfigError(
                f"{key} leaves {ranks} processes to share each expert, which do not divide the {each.rows} "
                f"rows of {each.name}; use a larger {'ep' if ep > 1 else 'tp'}, or fewer processes in dp_shard."
            )
    adapter = recipe.adapter
    field = "target_parameters" if adapter.target_parameters else None
    field = "quantize_experts" if adapter.quantize_experts else field
    if field is not None:
        raise ConfigError(
            f"{key} does not work with adapter.{field}: PEFT wraps the experts and replaces their weights in each "
            f"forward pass; remove adapter.{field} to adapt linear layers alone, or {key.partition('=')[0]}."
        )


def _check_degree(shape: ModelShape, layout: Layout) -> None:
    """Raise ConfigError unless `ep` divides the experts."""
    ep = layout.ep
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
