"""The sizes of the other models that processes keep: the teacher of a distillation, and reward models."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.run_files import RunFiles, is_run
from echelon.ground.stored import read_json
from echelon.planner.shape import build_shape

if TYPE_CHECKING:
    from echelon.recipe import Recipe


def count_teacher(recipe: "Recipe") -> int:
    """Return the parameters of the teacher that processes keep in memory; 0 without one, and for one not found here.

    Raises ConfigError if its config describes no model.
    """
    source = recipe.objective.teacher
    return 0 if source is None or not recipe.objective.teacher_in_memory else _count(Path(source))


def count_reward_models(recipe: "Recipe") -> int:
    """Return the parameters of the recipe's reward models. Those that are not here count zero.

    Raises ConfigError if a config describes no model.
    """
    return sum(_count(Path(reward.model_path)) for reward in recipe.reward if reward.model_path is not None)


@cache
def _count(folder: Path) -> int:
    model = RunFiles(folder).model_dir if is_run(folder) else folder
    try:
        return build_shape(read_json(model / "config.json")).num_parameters
    except (OSError, ValueError):
        return 0
