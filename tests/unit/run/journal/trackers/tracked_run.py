"""A run folder whose metrics a tracker forwards."""

import json

from echelon.run.folder.run_folder import RunFolder
from tests.unit.recipe_samples import SMALL, load_text


def create_run(folder, tracker):
    """A recipe with the tracker, and its run folder."""
    recipe, _ = load_text(folder, SMALL, f"run.dir={folder / 'runs' / 'small'}", f"track=[{tracker}]")
    run = RunFolder(recipe.run.dir)
    run.create()
    return recipe, run


def write(run, *rows):
    """Add rows to the metrics."""
    with run.metrics_path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
