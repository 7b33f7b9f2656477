"""The folder of a sweep: its files, its lock, and the comparison with an earlier start."""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.file_lock import FileLock, describe_mark
from echelon.ground.redaction import redact
from echelon.ground.stored import read_as, read_text, write_json, write_text
from echelon.launch.job import JobRecord
from echelon.launch.records import read_job
from echelon.recipe.difference import diff_recipes
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.recipe.render import plain_value, render_recipe
from echelon.recipe.yaml_text import parse_yaml, render_yaml, show_value
from echelon.run.folder.run_folder import OWNER_ONLY
from echelon.tools.sweep.sweep_file import Sweep

# Keys of the sweep file that may change between two starts: they do not affect the values of trials.
_FREE = ("sweep.parallel", "sweep.max_failures", "recipe")


class SweepFolder:
    """`sweep.yaml recipe.yaml began.json journal.log trials/000/ jobs/000-1/ results.json results.csv best.yaml *.png`.

    Creating the object does not access the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock")

    @property
    def sweep_path(self) -> Path:
        """The sweep file of the last start, with all defaults."""
        return self.path / "sweep.yaml"

    @property
    def recipe_path(self) -> Path:
        """The recipe without the values of any trial."""
        return self.path / "recipe.yaml"

    @property
    def journal_path(self) -> Path:
        """Optuna's journal of all trials, with their values and results."""
        return self.path / "journal.log"

    @property
    def best_path(self) -> Path:
        """The recipe of the best trial."""
        return self.path / "best.yaml"

    def trial_dir(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.path / "trials" / f"{number:03d}"

    def jobs(self, number: int) -> list[Path]:
        """The job folders of a trial, one per start, in order."""
        folders = (self.path / "jobs").glob(f"{number:03d}-*")
        return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))

    def next_job_dir(self, number: int) -> Path:
        """The job folder of the next start of a trial."""
        return self.path / "jobs" / f"{number:03d}-{len(self.jobs(number)) + 1}"

    def last_job(self, number: int) -> JobRecord | None:
        """The newest job of a trial; None if it has no readable record."""
        jobs = self.jobs(number)
        with suppress(ConfigError):
            return replace(read_job(jobs[-1]), run_dir=str(self.trial_dir(number))) if jobs else None
        return None

    @property
    def began_path(self) -> Path:
        """When the sweep began."""
        return self.path / "began.json"

    def began(self) -> float:
        """When the sweep began, in UTC seconds; now, if it has not. Raises ConfigError for a damaged file."""
        if not self.began_path.exists():
            return time.time()
        try:
            return read_as(self.began_path, dict[str, float])["time"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{self.began_path}: cannot be read ({error}); restore it from a backup.") from error

    def lock(self) -> None:
        """Lock the folder until this process ends; creates it, accessible to its owner only, if it does not exist.

        Raises ConfigError if another sweep holds the lock.
        """
        self.path.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        if not self._lock.take():
            raise ConfigError(
                f"sweep.dir={self.path} is in use by a live sweep (pid {self._lock.read_holder() or 'unknown'}); wait "
                f"for it, stop it, or give this sweep another sweep.name.{describe_mark(self._lock)}"
            )

    def unlock(self) -> None:
        """Release the lock; has no effect if it is not held."""
        self._lock.release()

    def agree(self, sweep: Sweep, recipe: Recipe) -> None:
        """Store the sweep file and recipe, after comparing them with those of an earlier start.

        Raises ConfigError with the differences. `sweep.parallel`, `sweep.max_failures` and the recipe's `launch` may
        change, and `sweep.trials` may grow.
        """
        mine = redact(plain_value(sweep))
        if self.sweep_path.exists():
            before, _ = parse_yaml(read_text(self.sweep_path), str(self.sweep_path))
            lines = [*_compare(before, mine), *self._compare_recipe(recipe)]
            if lines:
                shown = "\n".join(f"  {line}" for line in lines)
                raise ConfigError(
                    f"sweep.dir={self.path} contains another sweep:\n{shown}\nrestore these keys to resume it, or give "
                    "this sweep another sweep.name; sweep.trials may grow."
                )
        elif self.journal_path.exists():
            raise ConfigError(f"sweep.dir={self.path} contains files but no sweep; choose a new folder.")
        if not self.began_path.exists():
            write_json(self.began_path, {"time": time.time()})
        write_text(self.recipe_path, render_recipe(recipe))
        write_text(self.sweep_path, render_yaml(mine))

    def _compare_recipe(self, recipe: Recipe) -> list[str]:
        before, _ = load_recipe(self.recipe_path)
        differences = diff_recipes(before, recipe)
        if "sagemaker" not in (before.launch.to, recipe.launch.to):  # the run folders of its jobs are in S3
            return [
                f"{self.recipe_path.name}: {difference}"
                for difference in differences
                if not difference.key.startswith("launch.")
            ]
        return [
            f"{self.recipe_path.name}: {difference}"
            for difference in differences
            if not difference.key.startswith("launch.") or difference.key in ("launch.to", "launch.sagemaker.bucket")
        ]


def _compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences of two sweep files, one line each; `set` is compared as part of the recipe."""
    lines = []
    flat = [
        {f"{section}.{key}": value for section in ("sweep", "search") for key, value in sweep[section].items()}
        for sweep in (before, after)
    ]
    for key in flat[0] | flat[1]:
        old, new = (values.get(key) for values in flat)
        grown = key == "sweep.trials" and old is not None and new is not None and new >= old
        if old != new and not grown and key not in _FREE:
            lines.append(f"{key}: {show_value(old)} -> {show_value(new)}")
    return lines
