"""What context parallelism cannot divide, found from the recipe and the model's shape alone."""

from typing import TYPE_CHECKING

from echelon.errors import ConfigError, PlanError
from echelon.planner.degrees import join_words
from echelon.planner.layout import Layout
from echelon.planner.model_shape import ModelShape, divisors

if TYPE_CHECKING:
    from echelon.recipe import Recipe


def check_context(recipe: "Recipe", layout: Layout, shape: ModelShape) -> None:
    """Refuse a recipe that cannot have its sequences divided.

    Raises ConfigError for preference pairs, PlanError if the heads cannot be divided, with the degrees that fit.
    """
    if layout.cp == 1:
        return
    if recipe.objective.name == "dpo":
        raise ConfigError(
            f"parallel.cp={layout.cp} does not work with objective.name=dpo: its loss is a function of the sum over an "
            "answer, and each process has only a part of it; use cp: 1, or objective.name=causal_lm."
        )
    heads = shape.num_heads
    if layout.cp_method == "ulysses" and heads % layout.cp:
        fits = join_words([str(degree) for degree in divisors(heads) if degree > 1] or ["1"])
        raise PlanError(
            f"parallel.cp={layout.cp} with cp_method=ulysses does not divide the {heads} attention heads of the model; "
            f"use cp = {fits}, or cp_method: allgather."
        )
