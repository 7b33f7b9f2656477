"""The sizes of the other models that processes keep: the teacher of a distillation, and reward models."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.run_files import RunFiles, is_run
from echelon.ground.stored import read_json
from echelon.planner.model_shape import ModelShape
from echelon.planner.shape import build_shape

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


def count_teacher(recipe: "Recipe") -> tuple[int, int]:
    """Return the parameters and the hidden size of the teacher that processes keep in memory.

    Zeros without one, and for one not found here. Raises ConfigError if its config describes no model.
    """
    source = recipe.objective.teacher
    shape = None if source is None or not recipe.objective.teacher_in_memory else _find_shape(source)
    return (0, 0) if shape is None else (shape.num_parameters, shape.hidden_size)


def count_reward_models(recipe: "Recipe") -> int:
    """Return the parameters of the recipe's reward models. Those that are not here count zero.

    Raises ConfigError if a config describes no model.
    """
    shapes = [_find_shape(reward.model_path) for reward in recipe.reward if reward.model_path is not None]
    return sum(shape.num_parameters for shape in shapes if shape is not None)


def list_uncounted(recipe: "Recipe") -> list[str]:
    """Return a line for each teacher and reward model whose config is not on this machine, and which counts zero."""
    kept = {"objective.teacher": recipe.objective.teacher if recipe.objective.teacher_in_memory else None}
    kept |= {f"reward.{index}.options.path": reward.model_path for index, reward in enumerate(recipe.reward)}
    return [
        f"memory: {key}={source} is not counted, because its config.json is not on this machine"
        for key, source in kept.items()
        if source is not None and _find_config(source) is None
    ]


def _find_shape(source: str) -> ModelShape | None:
    path = _find_config(source)
    return None if path is None else _read_shape(path)


@cache
def _read_shape(path: Path) -> ModelShape | None:
    try:
        return build_shape(read_json(path), has_adapter=False)
    except (OSError, ValueError):
        return None


def _find_config(source: str) -> Path | None:
    """Return the config.json of a folder, a run, or the newest copy that the hub's cache has of a model."""
    folder = Path(source)
    if folder.is_dir():
        path = (RunFiles(folder).model_dir if is_run(folder) else folder) / "config.json"
        return path if path.is_file() else None
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:
        return None
    snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=source, repo_type="model"), "snapshots")
    return max(snapshots.glob("*/config.json"), key=lambda path: path.lstat().st_mtime, default=None)
