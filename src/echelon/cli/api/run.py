"""A run's folder as an object: its recipe, plan, status, metrics, events and checkpoints."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.ground.run_files import is_run
from echelon.ground.stored import Row
from echelon.run.folder.overview import RunStatus, find_status
from echelon.run.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame

    from echelon.learn.checkpoint.folder import Checkpoint
    from echelon.planner.plan import ParallelPlan
    from echelon.recipe.document import Recipe


class Run:
    """A run, identified by its folder. All values are read from the files on access, also while the run trains.

    It is a path-like object: `evaluate(run)`, `Path(run)`, `open(run / "plan.json")`.
    """

    def __init__(self, folder: "str | Path | Run") -> None:
        """Raises ConfigError if the folder is not a run."""
        self.path = Path(folder)
        if not is_run(self.path):
            raise ConfigError(f"{self.path} is not a run folder: it has no recipe.yaml; give runs/NAME.")
        self._folder = RunFolder(self.path)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @override
    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.status} at step {self.step}"

    @property
    def recipe(self) -> "Recipe":
        """The recipe as run, with all defaults, without secrets."""
        from echelon.recipe.load import load_recipe

        return load_recipe(self._folder.recipe_path)[0]

    @property
    def plan(self) -> "ParallelPlan":
        """The parallel plan: how the work is distributed over the processes."""
        from echelon.planner.plan import load_plan

        return load_plan(self._folder.plan_path)

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl; 0 before the first."""
        return self._folder.rows.last_step()

    @property
    def status(self) -> RunStatus:
        """The status of the run: running, done, stopped, failed or interrupted; see `RunStatus`."""
        return find_status(self._folder)

    def metrics(self, kind: str | None = "train") -> list[Row]:
        """Return the rows of metrics.jsonl in order: those of kind `train` or `eval`, or with None all rows."""
        rows = self._folder.read_metrics().rows
        return [row for row in rows if kind is None or row["kind"] == kind]

    def metrics_frame(self, kind: str | None = "train") -> "DataFrame":
        """Return `metrics` as a pandas DataFrame indexed by step. Raises ConfigError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "Run.metrics_frame() needs pandas, which is not installed; run `pip install pandas`, or use "
                "Run.metrics(), which gives the rows as dictionaries."
            ) from error
        frame: DataFrame = pandas.DataFrame(self.metrics(kind))
        return frame.set_index("step") if len(frame) else frame

    def events(self, event: str | None = None) -> list[Row]:
        """Return the rows of events.jsonl in order: all, or those of one event, for example `checkpoint`."""
        return [row for row in self._folder.rows.read_events() if event is None or row["event"] == event]

    def checkpoints(self) -> "list[Checkpoint]":
        """Return the published checkpoints, oldest first, each with its `step` and `path`."""
        from echelon.learn.checkpoint.folder import list_checkpoints

        return list_checkpoints(self.path)
