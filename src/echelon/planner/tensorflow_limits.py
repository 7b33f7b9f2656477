"""What `engine: tensorflow` needs of a plan."""

from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.plan import ParallelPlan

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


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
