"""Compute the metric of a trial from its metrics.jsonl."""

import math
from pathlib import Path
from typing import Any

from echelon.ground.run_files import is_metrics_row
from echelon.ground.stored import Row, open_regular, parse_row, whole_lines
from echelon.run.folder.run_folder import RunFolder
from echelon.tools.sweep.sweep_file import TASKS, SweepSettings

# metric: kind of row and its field
_FIELDS = {
    "eval_loss": ("eval", "loss"),
    "best_eval_loss": ("eval", "loss"),
    "eval_bits_per_byte": ("eval", "bits_per_byte"),
    "eval_reward_accuracy": ("eval", "reward_accuracy"),
    "eval_reward_margin": ("eval", "reward_margin"),
    "eval_accuracy": ("eval", "accuracy"),
    "eval_macro_f1": ("eval", "macro_f1"),
    "train_loss": ("train", "loss"),
    "tokens_per_second": ("train", "tokens_per_second"),
    "mfu": ("train", "mfu"),
}


class MetricsReader:
    """Reads each row of a growing file once; after a truncation, reads the file from the start again."""

    def __init__(self, run_dir: Path) -> None:
        self._path = RunFolder(run_dir).metrics_path
        self._offset = 0

    def read_new(self) -> list[Row]:
        """The rows since the last call; the file may be missing, and its last line incomplete."""
        try:
            with open_regular(self._path) as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole_lines(whole) if (row := parse_row(line, is_metrics_row)) is not None]


def read_rows(run_dir: Path) -> list[Row]:
    """All rows of a run's metrics.jsonl."""
    return MetricsReader(run_dir).read_new()


def measure(rows: list[Row], settings: SweepSettings) -> float | None:
    """The sweep's metric: the last evaluation's or the best one's, or the mean of the last `last_steps` steps.

    None if there is no value, as before the first evaluation; rows without a value are skipped.
    """
    kind, field = _FIELDS.get(settings.metric, ("tasks", settings.metric))
    values = [_read_task(row, field) if kind == "tasks" else row.get(field) for row in rows if row.get("kind") == kind]
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not numbers:
        return None
    if kind == "train":
        last = numbers[-settings.last_steps :]
        return math.fsum(last) / len(last)
    if settings.metric.startswith("best_"):
        return float(min(numbers) if settings.better == "minimize" else max(numbers))
    return float(numbers[-1])


def _read_task(row: Row, metric: str) -> Any:
    """The value of tasks/TASK/METRIC; None if the row does not have it."""
    task, _, name = metric.removeprefix(TASKS).rpartition("/")
    return row["tasks"].get(task, {}).get(name)


def training_hours(rows: list[Row]) -> float:
    """The total time of the steps in hours, without startup, evaluation and saving."""
    steps = (row.get("step_seconds") for row in rows if row.get("kind") == "train")
    return math.fsum(seconds for seconds in steps if isinstance(seconds, int | float)) / 3600
