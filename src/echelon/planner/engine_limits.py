"""What the engine of a recipe can run of a plan."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words
from echelon.planner.plan import ParallelPlan
from echelon.recipe.names import ENGINES, NATIVE

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


def with_engine(recipe: "Recipe", name: str) -> "Recipe":
    """The recipe with another engine, without the settings of other engines. Raises ConfigError if it cannot run it."""
    from echelon.recipe.load import build_recipe
    from echelon.recipe.render import recipe_mapping

    mapping = recipe_mapping(recipe)
    for other in ENGINES.keys() - {name}:
        mapping.pop(other, None)
    return build_recipe({**mapping, "engine": name})[0]


def compare_engines(recipe: "Recipe", make_plan: Callable[["Recipe"], ParallelPlan]) -> Iterator[str]:
    """Yield lines about each engine: the plan that it would run of a recipe, or why it refuses it.

    `make_plan`: plans a recipe on the cluster.
    """
    yield "engines for this recipe:"
    for name in dict.fromkeys((NATIVE, *ENGINES)):
        row = ENGINES[name]
        try:
            plan = make_plan(with_engine(recipe, name))
        except (ConfigError, PlanError) as error:
            yield f"  {name}: refuses it: {str(error).removeprefix('recipe: ')}"
        else:
            is_here = row.package is None or find_spec(row.package) is not None
            words = "" if is_here else f"; {row.package} is not installed here"
            yield f"  {name}: {plan.strategy}, {plan.num_microbatches} x {plan.micro_batch_size} sequences{words}"
        if row.purpose:
            yield f"    for: {row.purpose}"
        if row.instead:
            yield f"    native instead: {row.instead}"


def check_engine(recipe: "Recipe", plan: ParallelPlan) -> None:
    """Raise PlanError or ConfigError if the engine of the recipe cannot run the plan."""
    row = ENGINES[recipe.engine]
    if row.strategies is not None and plan.strategy not in row.strategies:
        raise PlanError(
            f"parallel: the plan is {plan.strategy}, and engine={recipe.engine} runs {join_words(list(row.strategies))}"
            f"; use one of these, or engine={NATIVE}."
        )
    if row.check is not None:
        resolve_name(row.check)(recipe, plan)


def check_tensorflow(recipe: "Recipe", plan: ParallelPlan) -> None:
    """Raise PlanError for a strategy that the plan's processes cannot run, ConfigError for a precision but fp32."""
    strategy = recipe.tensorflow.strategy
    if strategy != "multi_worker" and plan.world_size > 1:
        raise PlanError(
            f"tensorflow.strategy={strategy} is for one process, and the plan has {plan.world_size}; use "
            "tensorflow.strategy=multi_worker, or start one process."
        )
    if plan.precision.compute != "float32":
        raise ConfigError(
            f"train.precision=auto is {plan.precision.compute} on this machine, and engine=tensorflow computes in "
            "fp32; set train.precision=fp32."
        )
