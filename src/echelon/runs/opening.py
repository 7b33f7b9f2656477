"""How a run is found again: what a recipe's run folder holds, whether that may go on, and what changed since."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echelon.errors import ConfigError
from echelon.recipe import Difference, Recipe, blocking_differences, diff_recipes, load_recipe
from echelon.runs.run_folder import FILES, FOLDERS, TEMPORARY, RunFolder, list_directory

logger = logging.getLogger(__name__)

# What a run leaves in its folder before recipe.yaml exists; any other file means the folder is somebody else's.
_EARLY_FILES = {
    ".lock", ".outcomes", "logs", "checkpoints", "events.jsonl", "data.json", "environment.json", "estimate.json",
    "plan.json", "remote.json", "metrics.jsonl", "samples.jsonl", "trackers",
    "spending.json",
}  # fmt: skip
# A finished run goes on only when one of these asks for more.
_LENGTH_KEYS = ("train.steps", "train.tokens", "train.epochs", "evaluate.early_stopping")

RunState = Literal["new", "resumed", "finished"]


@dataclass(frozen=True)
class OpenedRun:
    """A run folder ready to be used, locked unless finished, the recipe it was run by, and how this one differs."""

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
    """Find out what `recipe.run.dir` holds: nothing, a run to resume, or one that has finished; lock it.

    A run whose recipe differs in a key that would change the model or its data raises ConfigError with the
    difference; `fresh` moves the old run aside instead. `check` is called for a run that starts anew, before its
    folder is made and before an old run is moved aside: what it refuses leaves everything as it was. `bring_back` may
    fill the locked folder with what the run left elsewhere; it is not called where a run starts afresh.
    `patience_seconds` is how long a live run may take to end.
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


def _reopen(folder: RunFolder, recipe: Recipe) -> OpenedRun:
    """Compare with the recipe that ran here, and log what changed."""
    try:
        old, _ = load_recipe(folder.recipe_path)
    except ConfigError as error:
        raise ConfigError(
            f"run.dir={folder.path} holds a run whose recipe cannot be read ({error}); "
            "pass --fresh to move it aside, or choose another run.name."
        ) from error
    blocking = blocking_differences(old, recipe)
    if blocking:
        shown = "\n".join(f"  {line}" for line in _render_differences(blocking))
        raise ConfigError(
            f"run.dir={folder.path} holds a run of another recipe:\n{shown}\n"
            "restore these keys to resume it, pass --fresh to move it aside, or choose another run.name."
        )
    differences = tuple(diff_recipes(old, recipe))
    if folder.is_finished() and not any(difference.key in _LENGTH_KEYS for difference in differences):
        folder.unlock()
        logger.info(f"run: {folder.path} has finished{folder.remedy()}, or pass --fresh to start again.")
        return OpenedRun(folder, "finished", differences, old)
    for line in _render_differences(differences):
        logger.info(f"run: changed {line}")
    for line in folder.rows.describe_bad_lines():
        logger.warning(f"run: {line}")
    return OpenedRun(folder, "resumed", differences, old)


def _render_differences(differences: list[Difference] | tuple[Difference, ...]) -> list[str]:
    return [f"{each.key}: {each.old!r} -> {each.new!r}" for each in differences]


def _refuse_foreign_folder(folder: RunFolder) -> None:
    """Refuse a folder with files that no run wrote. It is neither used nor moved aside."""
    if folder.path.is_file():
        raise ConfigError(f"run.dir={folder.path} is a file; give a folder.")
    if folder.recipe_path.exists():
        return
    names = {path.name for path in list_directory(folder.path) if not TEMPORARY.fullmatch(path.name)} - _EARLY_FILES
    if names:
        raise ConfigError(
            f"run.dir={folder.path} holds files but no run (for example {min(names)}); "
            "choose a new folder, or an empty one."
        )


def _refuse_misplaced(folder: RunFolder) -> None:
    """Refuse a folder in the place of one of the run's files, or a file in the place of a folder."""
    files = (folder.path / name for name in (*FILES, ".lock"))
    for path in (*files, *folder.logs_dir.glob("*.log"), *folder.model_dir.glob("*.json")):
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, where the run keeps a file; move it away, or restore the file.")
    for name in FOLDERS:
        if (path := folder.path / name).exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file, where the run keeps a folder; move it away.")
