"""The folder of a sweep: its files, its lock, and the comparison with an earlier start."""

import fcntl
import os
import platform
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError
from echelon.launch.job import JobRecord
from echelon.launch.records import read_job
from echelon.recipe import Recipe, diff_recipes, load_recipe, render_recipe
from echelon.recipe.render import plain_value
from echelon.recipe.yaml_text import parse_yaml, render_yaml, show_value
from echelon.redaction import redact
from echelon.runs.run_folder import OWNER_ONLY
from echelon.stored import write_text
from echelon.sweep.sweep_file import Sweep

# Of the sweep file, what may change between two starts: none of it changes which values a trial has.
_FREE = ("sweep.parallel", "sweep.max_failures", "recipe")


class SweepFolder:
    """`sweep.yaml recipe.yaml journal.log trials/000/ jobs/000-1/ results.json results.csv best.yaml` and the plots.

    Making the object touches nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    @property
    def sweep_path(self) -> Path:
        """The sweep file as it was last started, every default written out."""
        return self.path / "sweep.yaml"

    @property
    def recipe_path(self) -> Path:
        """The recipe without any trial's own values."""
        return self.path / "recipe.yaml"

    @property
    def journal_path(self) -> Path:
        """Optuna's journal: every trial with its values and how it ended."""
        return self.path / "journal.log"

    @property
    def best_path(self) -> Path:
        """The recipe of the best trial."""
        return self.path / "best.yaml"

    def trial_dir(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.path / "trials" / f"{number:03d}"

    def jobs(self, number: int) -> list[Path]:
        """The job folders of a trial, one for each start, in order."""
        found = (self.path / "jobs").glob(f"{number:03d}-*")
        return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))

    def next_job_dir(self, number: int) -> Path:
        """Where the next start of a trial keeps its job."""
        return self.path / "jobs" / f"{number:03d}-{len(self.jobs(number)) + 1}"

    def last_job(self, number: int) -> JobRecord | None:
        """The newest job of a trial; None where it never was submitted, or died in that moment."""
        jobs = self.jobs(number)
        return read_job(jobs[-1]) if jobs else None

    def lock(self) -> None:
        """Hold the folder until this process ends; where there is none it is made, for its owner alone.

        A live sweep raises ConfigError.
        """
        self.path.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 100).decode("utf-8", "replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(
                f"sweep.dir={self.path} is in use by a live sweep (pid {holder}); wait for it, stop it, or give this "
                "sweep another sweep.name."
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()} on {platform.node()}\n".encode())
        self._lock_fd = fd

    def unlock(self) -> None:
        """Let go of the folder; harmless when it is not held."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def agree(self, sweep: Sweep, recipe: Recipe) -> None:
        """Write down what this sweep is, or compare it with what it was. Raises ConfigError showing what differs.

        `sweep.parallel` and `sweep.max_failures` may change, `sweep.trials` may grow, and the recipe's `launch` may.
        """
        mine = redact(plain_value(sweep))
        if self.sweep_path.exists():
            before, _ = parse_yaml(self.sweep_path.read_text(encoding="utf-8"), str(self.sweep_path))
            lines = [*_compare(before, mine), *self._compare_recipe(recipe)]
            if lines:
                shown = "\n".join(f"  {line}" for line in lines)
                raise ConfigError(
                    f"sweep.dir={self.path} holds another sweep:\n{shown}\nrestore these keys to go on with it, or "
                    "give this sweep another sweep.name; sweep.trials may grow."
                )
        elif self.journal_path.exists():
            raise ConfigError(f"sweep.dir={self.path} holds files but no sweep; choose a new folder.")
        write_text(self.recipe_path, render_recipe(recipe))
        write_text(self.sweep_path, render_yaml(mine))

    def _compare_recipe(self, recipe: Recipe) -> list[str]:
        before, _ = load_recipe(self.recipe_path)
        differences = diff_recipes(before, recipe)
        return [f"{self.recipe_path.name}: {each}" for each in differences if not each.key.startswith("launch.")]


def _compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs of two sweep files, a line each; `set` is part of the recipe, which is compared by itself."""
    lines = []
    flat = [
        {f"{section}.{key}": value for section in ("sweep", "search") for key, value in each[section].items()}
        for each in (before, after)
    ]
    for key in flat[0] | flat[1]:
        old, new = (each.get(key) for each in flat)
        grown = key == "sweep.trials" and old is not None and new is not None and new >= old
        if old != new and not grown and key not in _FREE:
            lines.append(f"{key}: {show_value(old)} -> {show_value(new)}")
    return lines
