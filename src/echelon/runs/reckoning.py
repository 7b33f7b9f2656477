"""Predicted beside measured: the steps of a run, its tokens per second, hours, dollars, and the memory by part."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError
from echelon.planner.measured_runs import FEWEST_STEPS, record_run
from echelon.planner.plan import load_plan
from echelon.runs.cost import read_spending
from echelon.runs.run_folder import RunFolder
from echelon.sizes import render_bytes
from echelon.stored import read_as, write_json

_FIRST_STEPS = 3  # of a run, which compile and allocate
_FEWEST, _RECENT = 3, 200  # steps that are measured


@dataclass(frozen=True)
class Reckoning:
    """Values by name, predicted and measured; the names of bytes begin with `memory`. num_steps: that were measured."""

    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    num_steps: int = 0

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured, less 1; without what is measured as 0."""
        return {name: self.predicted[name] / value - 1 for name, value in self.measured.items() if value}

    def to_dict(self) -> dict[str, Any]:
        """The fields of the event `reckoning`, and of estimate.json."""
        return {"predicted": dict(self.predicted), "measured": dict(self.measured), "errors": self.errors}

    def describe(self) -> Iterator[str]:
        """A table of time and cost; that of memory is printed with the rehearsal's."""
        names = [name for name in self.measured if not name.startswith("memory_") or name == "memory_total"]
        if not names:
            return
        yield f"{'reckoning':<18}{'predicted':>14}{'measured':>14}{'error':>10}"
        for name in names:
            words = [_render(name, values[name]) for values in (self.predicted, self.measured)]
            error = f"{self.errors[name]:+.1%}" if name in self.errors else "-"
            yield f"{name.replace('_', ' '):<18}{words[0]:>14}{words[1]:>14}{error:>10}"


def _render(name: str, value: float) -> str:
    if name.startswith("memory"):
        return render_bytes(round(value))
    return f"{value:,.0f}" if name == "tokens_per_second" else f"{value:.4g}"


def reckon(folder: RunFolder) -> Reckoning | None:
    """Compare estimate.json with the run so far; None if too few steps are measured, or nothing was predicted.

    Raises OSError or ValueError if the folder cannot be read.
    """
    estimate = read_as(folder.estimate_path, dict[str, Any])
    predicted: dict[str, float] = {}
    measured: dict[str, float] = {}
    num_steps = _add_steps(folder, estimate, predicted, measured)
    for event in folder.rows.read_events()[::-1]:
        if event["event"] == "memory":
            for side, values in (("planned", predicted), ("measured", measured)):
                values.update({f"memory_{part}": float(size) for part, size in event[side].items()})
                values["memory_total"] = float(sum(event[side].values()))
            break
    return Reckoning(predicted, measured, num_steps) if measured else None


def _add_steps(
    folder: RunFolder, estimate: Mapping[str, Any], predicted: dict[str, float], measured: dict[str, float]
) -> int:
    """Add seconds of a step, tokens per second, hours and dollars of all steps. Returns how many were measured."""
    seconds = estimate.get("seconds")
    rows = [
        row
        for row in folder.rows.read_metrics().rows
        if row["kind"] == "train" and row["step"] > _FIRST_STEPS and row.get("step_seconds")
    ][-_RECENT:]
    if not seconds or len(rows) < _FEWEST:
        return 0
    step = statistics.median(row["step_seconds"] for row in rows)
    tokens = statistics.median(row["step_seconds"] * (row.get("tokens_per_second") or 0.0) for row in rows)
    spent, count = read_spending(folder), estimate.get("schedule", {}).get("steps")
    for each, values in ((float(seconds["step"]), predicted), (step, measured)):
        values["step_seconds"] = each
        if tokens:
            values["tokens_per_second"] = tokens / each
        if count:
            values["hours"] = each * count / 3600
            if spent.usd and spent.seconds:
                values["usd"] = each * count * spent.usd / spent.seconds
    return len(rows)


def store_reckoning(folder: RunFolder, reckoning: Reckoning, step: int) -> None:
    """Write it to events.jsonl and into estimate.json. Raises OSError or ValueError."""
    folder.rows.append_event("reckoning", step=step, **reckoning.to_dict())
    stored = read_as(folder.estimate_path, dict[str, Any])
    write_json(folder.estimate_path, stored | {"reckoning": reckoning.to_dict()})


def sharpen_later_plans(folder: RunFolder, reckoning: Reckoning, cache_dir: Path) -> str | None:
    """Keep the run for later plans of its model on its devices; returns the message about it.

    None if too few steps were measured, or their time was not predicted. Raises OSError or ValueError.
    """
    history = read_as(folder.estimate_path, dict[str, Any]).get("history")
    if not history or reckoning.num_steps < FEWEST_STEPS:
        return None
    predicted = reckoning.predicted["step_seconds"] / history["factor"]
    measured = reckoning.measured["step_seconds"]
    run = record_run(cache_dir, history["key"], str(folder.path), load_plan(folder.plan_path), predicted, measured)
    return f"later plans of this model on such devices: corrected by a factor of {run.factor:.2f}, measured in this run"


def describe_accuracy(paths: Sequence[Path]) -> Iterator[str]:
    """A table of the errors of these runs, and their median. Raises ConfigError for a folder without a reckoning."""
    errors = {path: _find_errors(path) for path in paths}
    names = ("step_seconds", "memory_total")
    width = max(len(str(path)) for path in paths)
    yield f"{'run':<{width}}{'step seconds':>16}{'memory total':>16}"
    for path, found in errors.items():
        cells = (f"{found[name]:+.1%}" if name in found else "-" for name in names)
        yield f"{path!s:<{width}}" + "".join(f"{cell:>16}" for cell in cells)
    known = [[abs(found[name]) for found in errors.values() if name in found] for name in names]
    cells = (f"{statistics.median(each):.1%}" if each else "-" for each in known)
    yield f"{'median error':<{width}}" + "".join(f"{cell:>16}" for cell in cells)


def _find_errors(path: Path) -> dict[str, float]:
    try:
        found = reckon(RunFolder(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a run folder with an estimate ({error}); give the folders of runs."
        ) from error
    if found is None:
        raise ConfigError(
            f"{path} has nothing to compare: fewer than {_FEWEST} measured steps, or devices of unknown speed."
        )
    return found.errors
