"""The results of a sweep: the metric of each trial, a table, results.json, results.csv, the best recipe, and Optuna's
plots."""

import csv
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.run_files import is_metrics_row
from echelon.ground.sizes import render_duration
from echelon.ground.stored import Row, open_regular, parse_row, whole_lines, write_json, write_text
from echelon.recipe.document import Recipe
from echelon.recipe.render import render_recipe
from echelon.recipe.yaml_text import render_inline
from echelon.run.folder.run_folder import RunFolder
from echelon.tools.sweep.space import Space, Values
from echelon.tools.sweep.study import MESSAGE, SweepStudy
from echelon.tools.sweep.sweep_file import TASKS, Sweep, SweepSettings
from echelon.tools.sweep.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from optuna import Study

_STATES = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished", "WAITING": "unfinished"}
_LONGEST_MESSAGE = 60
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


@dataclass(frozen=True)
class TrialResult:
    """One trial. `rank` is 1 for the best completed trial, None for others. `hours` is the total time of its steps."""

    rank: int | None
    trial: int
    state: str
    value: float | None
    values: Values
    hours: float
    message: str
    run: str


def list_results(sweep: Sweep, space: Space, study: SweepStudy, folder: SweepFolder) -> list[TrialResult]:
    """All trials: the completed ones, best first, then the others by number."""
    sign = 1 if sweep.sweep.better == "minimize" else -1
    trials = sorted(
        study.trials(), key=lambda trial: (trial.state.name != "COMPLETE", sign * (trial.value or 0.0), trial.number)
    )
    labels = {
        dimension.key: {dimension.label(value): value for value in dimension.choices} for dimension in space.dimensions
    }
    results = []
    for index, trial in enumerate(trials):
        run = folder.trial_dir(trial.number)
        done = trial.state.name == "COMPLETE"
        values = {key: labels[key].get(trial.params[key], trial.params[key]) for key in labels if key in trial.params}
        value = trial.value if done else max(trial.intermediate_values.items(), default=(0, None))[1]
        results.append(
            TrialResult(
                index + 1 if done else None,
                trial.number,
                _STATES[trial.state.name],
                value,
                values,
                training_hours(read_rows(run)),
                trial.user_attrs.get(MESSAGE, ""),
                str(run),
            )
        )
    return results


def results_mapping(sweep: Sweep, results: Sequence[TrialResult]) -> dict[str, Any]:
    """The contents of results.json."""
    best = next((result.trial for result in results if result.rank == 1), None)
    return {
        "sweep": sweep.sweep.name,
        "metric": sweep.sweep.metric,
        "direction": sweep.sweep.better,
        "best": best,
        "trials": [
            {
                "rank": result.rank, "trial": result.trial, "state": result.state, "value": result.value,
                "parameters": result.values, "hours": result.hours, "message": result.message, "run": result.run,
            }
            for result in results
        ],
    }  # fmt: skip


def write_results(sweep: Sweep, results: Sequence[TrialResult], folder: SweepFolder) -> None:
    """Replace results.json and results.csv."""
    write_json(folder.path / "results.json", results_mapping(sweep, results))
    keys = list(sweep.search)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "trial", "state", sweep.sweep.metric, "hours", *keys, "message", "run"])
    for result in results:
        shown = [_cell(result.values.get(key)) for key in keys]
        writer.writerow(
            [
                _cell(result.rank),
                result.trial,
                result.state,
                _cell(result.value),
                result.hours,
                *shown,
                result.message,
                result.run,
            ]
        )
    write_text(folder.path / "results.csv", text.getvalue())


def write_best(sweep: Sweep, best: TrialResult, recipe: Recipe, folder: SweepFolder) -> None:
    """Write the recipe of the best trial, with a comment about its origin."""
    lines = (
        f"# The best of the sweep {sweep.sweep.name}: trial {best.trial}, {sweep.sweep.metric} {best.value:.6g}",
        *(f"#   {key}: {_cell(value)}" for key, value in best.values.items()),
    )
    write_text(folder.best_path, "\n".join(lines) + "\n\n" + render_recipe(recipe))


def render_table(sweep: Sweep, results: Sequence[TrialResult]) -> list[str]:
    """The trials as a table for the console, each with its message, shortened, at the end."""
    keys = list(sweep.search)
    head = ["rank", "trial", *keys, sweep.sweep.metric, "state", "time"]
    rows = [
        [
            "-" if result.rank is None else str(result.rank),
            str(result.trial),
            *(_short(result.values.get(key)) for key in keys),
            "-" if result.value is None else f"{result.value:.6g}",
            result.state,
            render_duration(3600 * result.hours),
        ]
        for result in results
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    messages = ["", *(result.message for result in results)]
    return [line if not message else f"{line}  {_cut(message)}" for line, message in zip(lines, messages, strict=True)]


def _cut(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 3] + "..."


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _cell(value)


def _cell(value: Any) -> str:
    """A value as inline YAML; empty for None."""
    return "" if value is None else value if isinstance(value, str) else render_inline(value)


_DPI = 120


def draw_plots(study: "Study", metric: str, folder: SweepFolder) -> tuple[list[Path], list[str]]:
    """Draw history, parallel coordinates and importance; returns the files written, and a line per missing plot.

    Requires a study with a completed trial. Importance is the share of variance by fANOVA (Hutter, Hoos, Leyton-Brown,
    ICML 2014), whose random forest has a fixed seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from optuna.exceptions import ExperimentalWarning
    from optuna.importance import FanovaImportanceEvaluator
    from optuna.visualization import matplotlib as drawing

    def importance(study: "Study", target_name: str) -> Any:
        return drawing.plot_param_importances(
            study, evaluator=FanovaImportanceEvaluator(seed=0), target_name=target_name
        )

    plots: dict[str, Callable[..., Any]] = {
        "history": drawing.plot_optimization_history,
        "parallel_coordinates": drawing.plot_parallel_coordinate,
        "importance": importance,
    }
    written, missing = [], []
    for name, draw in plots.items():
        path = folder.path / f"{name}.png"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            try:
                axes = draw(study, target_name=metric)
            except (ValueError, RuntimeError, ZeroDivisionError) as error:  # Optuna has too little data
                missing.append(f"no {path.name}: {str(error).splitlines()[0] if str(error) else error!r}")
                continue
        axes.figure.set_size_inches(10, 6)
        axes.figure.savefig(path, dpi=_DPI, bbox_inches="tight")
        written.append(path)
    from matplotlib import pyplot

    pyplot.close("all")
    return written, missing


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
