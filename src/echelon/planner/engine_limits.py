"""What the engine of a recipe can run of a plan."""

from typing import TYPE_CHECKING

from echelon.errors import PlanError
from echelon.extensions import find_named
from echelon.planner.degrees import join_words
from echelon.planner.plan import ParallelPlan
from echelon.recipe.engines import ENGINES, NATIVE, EngineRow

if TYPE_CHECKING:
    from echelon.recipe import Recipe


def find_row(recipe: "Recipe") -> EngineRow:
    """The row of the recipe's engine."""
    return ENGINES[recipe.engine]


def check_engine(recipe: "Recipe", plan: ParallelPlan) -> None:
    """Raise PlanError or ConfigError if the engine of the recipe cannot run the plan."""
    row = find_row(recipe)
    if row.strategies is not None and plan.strategy not in row.strategies:
        raise PlanError(
            f"parallel: the plan is {plan.strategy}, and engine={recipe.engine} runs {join_words(list(row.strategies))}"
            f"; use one of these, or engine={NATIVE}."
        )
    if row.check is not None:
        find_named("engine", recipe.engine, {recipe.engine: row.check})(recipe, plan)
