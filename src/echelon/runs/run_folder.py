"""The run folder: where each file of a run stands, what has happened in it, and which process may write there.

`recipe.yaml plan.json estimate.json environment.json data.json hub.json remote.json metrics.jsonl events.jsonl
outcome.json spending.json checkpoints/step-00000100/ model/ export/ logs/rank-00000.log trackers/mlflow.json`
"""

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import ConfigError
from echelon.runs.folder_lock import FolderLock, explain_unusable
from echelon.runs.run_rows import RunRows
from echelon.runs.run_text import TextRecord
from echelon.stored import read_as, write_json

FILES = (
    "recipe.yaml", "plan.json", "estimate.json", "environment.json", "data.json", "hub.json", "remote.json",
    "metrics.jsonl", "samples.jsonl", "events.jsonl", "outcome.json", "spending.json",
)  # fmt: skip
"""The files that stand in a run folder itself, `.lock` beside them."""

FOLDERS = (".outcomes", "checkpoints", "export", "logs", "model", "tensorboard", "trackers", "wandb")
"""The folders in a run folder."""

OWNER_ONLY = 0o700
"""The mode of a new folder that holds recipes, scripts or logs; one that exists keeps its own."""

TEMPORARY = re.compile(r"\..+\.tmp")
"""What `stored.write_text` writes before a file gets its name."""


@dataclass(frozen=True)
class Ending:
    """How a run ended for good, as its outcome.json says."""

    outcome: str
    step: int | None = None


class RunFolder:
    """One run's folder. Making the object touches nothing; `create()` makes the directories.

    `outcomes_dir`: where ranks say how they ended, and hear of others, by default inside. The agent of one machine of
    several has it elsewhere, since its own ranks alone report to it.
    """

    def __init__(self, path: Path, outcomes_dir: Path | None = None) -> None:
        self.path = path
        self.outcomes_dir = outcomes_dir or path / ".outcomes"
        self.rows = RunRows(path)
        self.text = TextRecord(path, self.rows)
        self._lock = FolderLock(path)

    @property
    def recipe_path(self) -> Path:
        """The recipe, resolved, as run."""
        return self.path / "recipe.yaml"

    @property
    def plan_path(self) -> Path:
        """The ParallelPlan that runs."""
        return self.path / "plan.json"

    @property
    def estimate_path(self) -> Path:
        """What the plan was predicted to need, and on what hardware."""
        return self.path / "estimate.json"

    @property
    def environment_path(self) -> Path:
        """Versions, platform and the variables of the launcher."""
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a logged step."""
        return self.rows.metrics_path

    @property
    def samples_path(self) -> Path:
        """What the model made of `evaluate.prompts` at each evaluation."""
        return self.rows.samples_path

    @property
    def events_path(self) -> Path:
        """What happened when: see docs/checkpoints.md."""
        return self.rows.events_path

    @property
    def spending_path(self) -> Path:
        """What all starts of the run have used: see `echelon.runs.cost.Spending`."""
        return self.path / "spending.json"

    @property
    def outcome_path(self) -> Path:
        """Written when the run has finished; absent while it has not."""
        return self.path / "outcome.json"

    @property
    def checkpoints_dir(self) -> Path:
        """Holds step-00000100/ and its siblings."""
        return self.path / "checkpoints"

    @property
    def model_dir(self) -> Path:
        """The model's config.json and tokenizer, without weights."""
        return self.path / "model"

    @property
    def data_path(self) -> Path:
        """Names the prepared text that the run reads."""
        return self.text.path

    @property
    def hub_path(self) -> Path:
        """The commits of what the run takes from the Hugging Face hub; absent where it takes nothing."""
        return self.path / "hub.json"

    @property
    def remote_path(self) -> Path:
        """Which run this is, among those whose checkpoints are in an object store."""
        return self.path / "remote.json"

    @property
    def export_dir(self) -> Path:
        """Default place of an exported model."""
        return self.path / "export"

    @property
    def logs_dir(self) -> Path:
        """One file a rank, and `parent.log` for the command's own failures."""
        return self.path / "logs"

    @property
    def stop_path(self) -> Path:
        """Where the parent asks its workers to stop."""
        return self.outcomes_dir / "stop"

    @property
    def death_path(self) -> Path:
        """Where the parent tells its workers that one of them has died."""
        return self.outcomes_dir / "death"

    def write_pid(self, rank: int) -> None:
        """Note which process is this rank, for the parent to watch."""
        (self.outcomes_dir / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")

    def read_pids(self) -> dict[int, int]:
        """The process of each rank that has noted its own."""
        found = {path.name: path.read_text(encoding="utf-8") for path in self.outcomes_dir.glob("pid-*")}
        return {int(name.removeprefix("pid-")): int(text) for name, text in found.items() if text.isdecimal()}

    def tracker_path(self, name: str) -> Path:
        """What this tracker was given of the run."""
        return self.path / "trackers" / f"{name}.json"

    def log_path(self, rank: int) -> Path:
        """Where this rank's stdout and stderr go."""
        return self.logs_dir / f"rank-{rank:05d}.log"

    def create(self) -> None:
        """Make the folder, which only its owner can read, and its directories; existing ones stay as they are."""
        for directory in (self.path, self.checkpoints_dir, self.logs_dir, self.outcomes_dir):
            try:
                directory.mkdir(OWNER_ONLY if directory == self.path else 0o777, parents=True, exist_ok=True)
            except OSError as error:
                raise explain_unusable(self.path, "made", error) from error

    def lock(self, patience_seconds: float = 0.0) -> None:
        """Hold the folder for this process until `unlock()` or its end. A live run raises ConfigError with its pid.

        `patience_seconds`: how long one that is about to end may take to let go of it.
        """
        self.create()
        self._lock.acquire(patience_seconds)

    def unlock(self) -> None:
        """Let go of the folder; harmless when it is not held."""
        self._lock.release()

    def is_held(self) -> bool:
        """Whether a live process holds the folder, this one included."""
        return self._lock.is_held()

    def newest_step(self) -> int | None:
        """The step of the newest published checkpoint, by name alone; None when there is none."""
        return newest_step(self.checkpoints_dir)

    def is_finished(self) -> bool:
        """Whether the run reached its last step and said so."""
        return self.outcome_path.exists()

    def mark_finished(self, step: int | None = None, reason: str = "done") -> None:
        """Say that the run reached its last step, or stopped early for good (`reason`: early_stop).

        Only the process that holds the lock, or its rank 0, calls it.
        """
        write_json(self.outcome_path, {"time": time.time(), "outcome": reason, "step": step})

    def remedy(self) -> str:
        """What makes a finished run go on, to follow "has finished"."""
        try:
            ending = read_as(self.outcome_path, Ending)
        except (OSError, ValueError):
            ending = Ending("done")
        if ending.outcome == "early_stop":
            at = "" if ending.step is None else f", at step {ending.step}"
            return f" early{at}; raise evaluate.early_stopping, or set it to null, to go on"
        return "; raise train.steps to go on"

    def clear_outcomes(self, restart: bool = False) -> None:
        """Forget how earlier attempts ended, before a new one starts; a `restart` still hears of a stop."""
        self.outcome_path.unlink(missing_ok=True)
        for path in list_directory(self.outcomes_dir):
            if not (restart and path == self.stop_path):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a killed process left half written. For the holder of the lock, while no worker runs."""
        leftovers = [path for path in list_directory(self.path) if TEMPORARY.fullmatch(path.name)]
        for path in leftovers:
            path.unlink(missing_ok=True)
        sweep_checkpoints(self.checkpoints_dir)

    def move_aside(self) -> Path:
        """Rename the folder to NAME.old-1, or the first free number; returns where it went."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(target)
        return target


def describe_gone(path: Path) -> str:
    """The message of a run whose folder was removed."""
    return (
        f"run.dir={path} was removed or moved while the run went on, so nothing that it did since is kept; start the "
        "same command again to begin anew, or set run.dir to where the folder is now."
    )


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    return RunFolder(path).recipe_path.is_file()


def require_folder(path: Path) -> None:
    """Raise ConfigError unless there is a folder."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run folder (runs/NAME) or an HF model folder.")


def sweep_checkpoints(folder: Path) -> list[str]:
    """Take away what a killed process left half-written, half-removed or half-replaced; returns the names of it.

    A checkpoint that was to be replaced, and whose successor did not get its name, gets its own back.
    """
    swept = []
    for path in sorted(folder.glob(".*-*")):
        kind, _, step = path.name.partition("-")
        if kind == ".replaced" and not (final := folder / f"step-{step}").exists():
            path.rename(final)
        elif kind in (".writing", ".removing", ".replaced"):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path.name)
    return swept


def list_directory(path: Path) -> list[Path]:
    """What stands in a folder, by name; nothing where there is none."""
    return sorted(path.iterdir()) if path.is_dir() else []


def newest_step(folder: Path) -> int | None:
    """The step of the newest published checkpoint in a folder, by name alone; None when there is none."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in list_directory(folder))
    return max((int(name[1]) for name in names if name), default=None)
