"""The checks of a run that need no torch: its import takes seconds, and a wrong path or key is refused before it."""

from pathlib import Path

from echelon.learn.data.prepare_spec import prepare_spec
from echelon.learn.data.shared_folders import is_given
from echelon.learn.data.source import find_absent
from echelon.recipe.document import Recipe
from echelon.run.folder.open_run import check_folder
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.model_checks import check_counted


def check_early(recipe: Recipe, fresh: bool) -> None:
    """Check the run folder, the paths of the text and the shape of a new model. Writes nothing.

    `prepare_run` checks all of this again, with what takes longer, once it holds the lock. Raises ConfigError,
    DataError or PlanError, naming the key.
    """
    check_folder(recipe, fresh)
    folder = RunFolder(Path(recipe.run.dir))
    if folder.is_finished() and not fresh:
        return
    spec = prepare_spec(recipe)
    if not is_given(spec):
        for error in find_absent((*spec.train, *spec.validation)):
            raise error
    if fresh or not folder.recipe_path.exists():
        check_counted(recipe)
