"""A run's folder as an object: what was asked for, what was planned, what has happened, and what there is to load."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from echelon.errors import ConfigError
from echelon.runs.run_folder import RunFolder, is_run
from echelon.stored import Row

if TYPE_CHECKING:
    from pandas import DataFrame

    from echelon.checkpoint.folder import Checkpoint
    from echelon.planner.plan import ParallelPlan
    from echelon.recipe import Recipe

Status = Literal["running", "finished", "stopped", "failed", "interrupted"]

# What the last of these events says about a run that no process holds.
_ENDINGS: dict[str, Status] = {"signal": "stopped", "budget": "stopped", "failure": "failed"}
_BEGINNINGS = ("prepare", "start", "resume", "restart")


class Run:
    """A run, by its folder. Everything is read from the files when it is asked for, also while the run trains.

    It stands for its folder wherever a path is expected: `evaluate(run)`, `Path(run)`, `open(run / "plan.json")`.
    """

    def __init__(self, folder: "str | Path | Run") -> None:
        """Raises ConfigError where the folder holds no run."""
        self.path = Path(folder)
        if not is_run(self.path):
            raise ConfigError(f"{self.path} is no run folder: it has no recipe.yaml; give runs/NAME.")
        self._folder = RunFolder(self.path)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.status} at step {self.step}"

    @property
    def recipe(self) -> "Recipe":
        """The recipe as run, every default written out, secrets hidden."""
        from echelon.recipe import load_recipe

        return load_recipe(self._folder.recipe_path)[0]

    @property
    def plan(self) -> "ParallelPlan":
        """How the work is spread over the processes."""
        from echelon.planner.plan import load_plan

        return load_plan(self._folder.plan_path)

    @property
    def step(self) -> int:
        """The last step that metrics.jsonl has a row of; 0 before the first."""
        return self._folder.rows.last_step()

    @property
    def status(self) -> Status:
        """How the run stands.

        - running: a process holds the folder.
        - finished: it reached its last step, or stopped early for good.
        - stopped: by a signal or a budget; `train` goes on from its newest checkpoint.
        - failed: the last event is a failure.
        - interrupted: its processes are gone and left no word, as after a power cut.
        """
        if self._folder.is_held():
            return "running"
        if self._folder.is_finished():
            return "finished"
        events = [row["event"] for row in self._folder.rows.read_events()]
        last = next((each for each in reversed(events) if each in _ENDINGS or each in _BEGINNINGS), None)
        return _ENDINGS.get(last or "", "interrupted")

    def metrics(self, kind: str | None = "train") -> list[Row]:
        """The rows of metrics.jsonl, in order: of `train` steps, of `eval`uations, or, with None, of both."""
        rows = self._folder.rows.read_metrics().rows
        return [row for row in rows if kind is None or row["kind"] == kind]

    def metrics_frame(self, kind: str | None = "train") -> "DataFrame":
        """The same as a pandas DataFrame, indexed by step. Raises ConfigError where pandas is not installed."""
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
        """The rows of events.jsonl, in order: all of them, or those of one event, such as `checkpoint`."""
        return [row for row in self._folder.rows.read_events() if event is None or row["event"] == event]

    def checkpoints(self) -> "list[Checkpoint]":
        """The published checkpoints, oldest first, each with its `step` and `path`."""
        from echelon.checkpoint.folder import list_checkpoints

        return list_checkpoints(self.path)
