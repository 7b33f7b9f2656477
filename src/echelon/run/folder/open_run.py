"""Opens a recipe's run folder: whether the run is new, can be resumed or has finished, and what changed since."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echelon.ground.errors import ConfigError
from echelon.ground.run_files import list_directory
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import MAX_ROWS_BYTES
from echelon.recipe.difference import LENGTH_KEYS, Difference, blocking_differences, diff_recipes
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import FILES, FOLDERS, TEMPORARY, RunFolder

logger = logging.getLogger(__name__)

# Files that a run writes before recipe.yaml exists; any other file means that the folder is not a run's.
_EARLY_FILES = {
    ".lock", ".outcomes", "logs", "checkpoints", "events.jsonl", "data.json", "environment.json", "estimate.json",
    "hub.json", "models.json", "plan.json", "remote.json", "metrics.jsonl", "samples.jsonl", "trackers",
    "spending.json",
}  # fmt: skip
# A finished run continues only if one of these keys extends it.
_EXTENDING_KEYS = (*LENGTH_KEYS, "evaluate.early_stopping")
_ONLY_GROWS = (
    "  A run can become longer, never shorter: its learning rate was computed for its length. Its earlier checkpoints "
    "are the shorter training (`echelon export --checkpoint STEP`); for another schedule start a new run."
)

RunState = Literal["new", "resumed", "finished"]


@dataclass(frozen=True)
class OpenedRun:
    """A run folder, locked unless finished; `before` is the recipe it was run with, `differences` what changed."""

    folder: RunFolder
    state: RunState
    differences: tuple[Difference, ...] = ()
    before: Recipe | None = None


def open_run(
    recipe: Recipe,
    fresh: bool,
    check: Callable[[], None] = lambda: None,
    bring_back: Callable[[RunFolder], None] = lambda folder: None,
    patience_seconds: float = 0.0,
) -> OpenedRun:
    """Find out whether `recipe.run.dir` has no run, a run to resume, or a finished run, and lock it.

    Raises ConfigError with the differences if the recipe differs in a key that would change the model or its data;
    `fresh` moves the old run aside instead. `check` is called for a new run, before its folder is created or an old run
    is moved: if it raises, nothing has changed. `bring_back` may restore the run's files from elsewhere to the locked
    folder; it is not called with `fresh`. `patience_seconds` is how long to wait for a live run to end.
    """
    folder = RunFolder(Path(recipe.run.dir))
    _refuse_foreign_folder(folder)
    if not fresh:
        _refuse_misplaced(folder)
    had_recipe = folder.recipe_path.exists()
    if fresh or not had_recipe:
        check()
    folder.lock(patience_seconds)
    folder.sweep()
    if fresh:
        if had_recipe:
            target = folder.move_aside()
            folder.unlock()
            logger.info(f"run: the old run is now in {target}")
            folder.lock()
        return OpenedRun(folder, "new")
    try:
        bring_back(folder)
        if not folder.recipe_path.exists():
            return OpenedRun(folder, "new")
        return _reopen(folder, recipe)
    except BaseException:
        folder.unlock()
        raise


def check_folder(recipe: Recipe, fresh: bool) -> None:
    """Make the checks of `open_run` that need no lock. Writes nothing. Raises ConfigError."""
    folder = RunFolder(Path(recipe.run.dir))
    _refuse_foreign_folder(folder)
    if not folder.path.exists():
        folder.check_creatable()
    if not fresh:
        _refuse_misplaced(folder)
        if folder.recipe_path.exists():
            _compare(folder, recipe)


def _reopen(folder: RunFolder, recipe: Recipe) -> OpenedRun:
    """Open an existing run."""
    old, differences = _compare(folder, recipe)
    if folder.is_finished() and not any(difference.key in _EXTENDING_KEYS for difference in differences):
        folder.unlock()
        logger.info(f"run: {folder.path} has finished{folder.remedy()}, or pass --fresh to start again.")
        return OpenedRun(folder, "finished", differences, old)
    for line in folder.rows.describe_bad_lines():
        logger.warning(f"run: {line}")
    return OpenedRun(folder, "resumed", differences, old)


def _compare(folder: RunFolder, recipe: Recipe) -> tuple[Recipe, tuple[Difference, ...]]:
    """Return the recipe of the existing run, and what has changed. Raises ConfigError if it cannot be resumed."""
    try:
        old, _ = load_recipe(folder.recipe_path)
    except ConfigError as error:
        raise ConfigError(
            f"run.dir={folder.path} contains a run whose recipe cannot be read ({error}); "
            "pass --fresh to move it aside, or choose another run.name."
        ) from error
    if blocking := blocking_differences(old, recipe):
        lines = [f"  {line}" for line in blocking]
        if any(difference.key in LENGTH_KEYS for difference in blocking):
            lines.append(_ONLY_GROWS)
        shown = "\n".join(lines)
        raise ConfigError(
            f"run.dir={folder.path} contains a run with another recipe:\n{shown}\n"
            "restore these keys to resume it, pass --fresh to move it aside, or choose another run.name."
        )
    return old, tuple(diff_recipes(old, recipe))


def _refuse_foreign_folder(folder: RunFolder) -> None:
    """Refuse a folder with files that no run wrote; it is neither used nor moved aside."""
    if folder.path.is_file():
        raise ConfigError(f"run.dir={folder.path} is a file; give a folder.")
    if folder.recipe_path.exists():
        return
    names = {path.name for path in list_directory(folder.path) if not TEMPORARY.fullmatch(path.name)} - _EARLY_FILES
    if names:
        raise ConfigError(
            f"run.dir={folder.path} contains files but no run (for example {min(names)}); "
            "choose a new folder, or an empty one."
        )


def _refuse_misplaced(folder: RunFolder) -> None:
    """Refuse a run folder in which a folder, a pipe or a device has the name of a run's file, or a file of a folder."""
    files = (folder.path / name for name in (*FILES, ".lock"))
    for path in (*files, *folder.logs_dir.glob("*.log"), *folder.model_dir.glob("*.json")):
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "a pipe or a device"
            raise ConfigError(f"{path} is {what}, but must be a file of the run; remove it, or restore the file.")
    for path in (folder.metrics_path, folder.samples_path):
        if path.exists() and path.stat().st_size > MAX_ROWS_BYTES:
            raise ConfigError(
                f"{path} is larger than {render_bytes(MAX_ROWS_BYTES)}, the limit for such a file; move it away, and "
                "the run continues with a new one."
            )
    for name in FOLDERS:
        if (path := folder.path / name).exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file, but must be a folder of the run; remove it.")
