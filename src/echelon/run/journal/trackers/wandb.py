"""Weights & Biases: online according to its own settings, or files in the run's `wandb/` folder."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import wandb

from echelon.ground.redaction import redact
from echelon.ground.variables import read_environment, set_default_variables
from echelon.recipe.document import Recipe
from echelon.recipe.render import recipe_mapping
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers.tracker import Opened, scalars

_INIT_SECONDS = 30.0
_FINISH_SECONDS = 60.0


class WeightsAndBiases:
    """A W&B run whose id is the run's key, so that a resumed run continues it.

    W&B's own process accepts the rows immediately, stores them in a file, and uploads them when it can. It ignores
    steps that go backwards; the ledger records the rows it was given.
    """

    name = "wandb"
    is_store = True

    def __init__(self, recipe: Recipe, folder: RunFolder, resumed_step: int) -> None:
        set_default_variables({"WANDB_ERROR_REPORTING": "false"})
        self._recipe = recipe
        self._folder = folder.path.absolute()
        self._run: wandb.Run | None = None

    def open(self, run_key: str, given: Mapping[str, int]) -> Opened:
        """Start the run, or resume the one with this key."""
        if self._run is not None:
            wandb.teardown(exit_code=1)
        settings = {"console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_meta": True}
        settings |= {"init_timeout": _INIT_SECONDS, "finish_timeout": _FINISH_SECONDS, "login_timeout": 1.0}
        variables = {"WANDB_PROJECT": "echelon", **read_environment(), **self._recipe.launch.env}
        named = {"WANDB_PROJECT": "project", "WANDB_ENTITY": "entity", "WANDB_MODE": "mode"}
        settings |= {key: variables[name] for name, key in named.items() if name in variables}
        self._run = wandb.init(
            id=run_key,
            name=self._recipe.run.name,
            dir=self._folder,
            config=redact(recipe_mapping(self._recipe)),
            allow_val_change=True,
            resume="allow",
            settings=wandb.Settings(**settings),
        )
        return Opened(defaultdict(int, given), self._describe())

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Log every number of the rows at its step."""
        assert self._run is not None
        for row in rows:
            self._run.log(scalars(row), step=row["step"])

    def finish(self, done: bool) -> None:
        """Close the run, and end W&B's process, which would otherwise outlive this one."""
        assert self._run is not None
        self._run.finish(exit_code=0 if done else 1)
        wandb.teardown(exit_code=0 if done else 1)

    def _describe(self) -> str:
        assert self._run is not None
        if self._run.settings.mode == "online":
            return f"wandb run at {self._run.url}"
        files = self._folder / "wandb"
        return f"wandb run {self._run.id} in {files}; to upload it: wandb sync {files}/offline-run-*"
