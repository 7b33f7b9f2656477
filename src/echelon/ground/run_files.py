"""What everybody may read of a run folder: the paths of a run's results, its metrics, its checkpoints by name."""

import re
import shutil
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.ground.stored import Row, Rows, read_rows

_NUMBERS = ("loss", "grad_norm", "learning_rate", "tokens", "target_tokens", "tokens_per_second", "step_seconds")
_LARGEST = 1e300
UNFINISHED = (".writing", ".removing", ".replaced")  # names of checkpoints meanwhile, before a dash and the step


class RunFiles:
    """The paths of a run's results. The constructor does no I/O."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def recipe_path(self) -> Path:
        """The resolved recipe of the run."""
        return self.path / "recipe.yaml"

    @property
    def plan_path(self) -> Path:
        """The ParallelPlan of the run."""
        return self.path / "plan.json"

    @property
    def environment_path(self) -> Path:
        """Versions, platform, and the launcher's environment variables."""
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per logged step or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of the checkpoints, step-00000100/ and so on."""
        return self.path / "checkpoints"

    @property
    def model_dir(self) -> Path:
        """The model's config.json and tokenizer, without weights."""
        return self.path / "model"

    @property
    def hub_path(self) -> Path:
        """The commits of the run's models and datasets on the Hugging Face hub; absent if it uses none."""
        return self.path / "hub.json"

    def read_metrics(self) -> Rows:
        """Return the rows of metrics.jsonl, in order, and the numbers of invalid lines."""
        return read_rows(self.metrics_path, is_metrics_row)


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder."""
    return RunFiles(path).recipe_path.is_file()


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds an HF model (rather than an echelon run)."""
    return (path / "config.json").is_file()


def require_folder(path: Path) -> None:
    """Raise ConfigError unless a path is a folder."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run folder (runs/NAME) or an HF model folder.")


def require_model(path: Path) -> None:
    """Raise ConfigError unless a path is a run folder or an HF model folder. Nothing in it is read."""
    require_folder(path)
    if is_run(path) or is_model_folder(path):
        return
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{path} contains an adapter without its base model; give the run that trained it, or the folder that "
            "`echelon export RUN OUT --merge` writes."
        )
    raise ConfigError(f"{path} is neither a run folder (recipe.yaml) nor an HF model folder (config.json).")


def sweep_checkpoints(folder: Path) -> list[str]:
    """Remove folders that a killed process left half-written, half-removed or half-replaced; return their names.

    A checkpoint that was being replaced is restored if its successor was not published.
    """
    swept = []
    for path in sorted(folder.glob(".*-*")):
        kind, _, step = path.name.partition("-")
        if kind == ".replaced" and not (final := folder / f"step-{step}").exists():
            path.rename(final)
        elif kind in UNFINISHED:
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path.name)
    return swept


def list_directory(path: Path) -> list[Path]:
    """Return the sorted entries of a folder; empty if it does not exist."""
    return sorted(path.iterdir()) if path.is_dir() else []


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest published checkpoint in a folder, by name only; None if there is none."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in list_directory(folder))
    return max((int(name[1]) for name in names if name), default=None)


def is_metrics_row(row: Row) -> bool:
    """Whether a row is valid in metrics.jsonl: it has a kind and a step, and its numeric fields are numbers."""
    numbers = (row.get(name) for name in _NUMBERS)
    return (
        isinstance(row.get("kind"), str)
        and has_step(row)
        and all(value is None or isinstance(value, float) or is_number(value) for value in numbers)
        and all(
            named is None or (isinstance(named, dict) and all(isinstance(values, dict) for values in named.values()))
            for named in (row.get("sets"), row.get("tasks"))
        )
    )


def has_step(row: Row) -> bool:
    """Whether a row names its step."""
    return is_count(row.get("step"))


def is_count(value: object) -> bool:
    """Whether a value is a whole number from 0 to 2**53 - 1, which JSON carries exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    # By comparison: an integer may be too large for a float. NaN compares False.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
