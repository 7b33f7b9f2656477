"""Predicted beside measured: the steps of a run, its tokens per second, hours, dollars, and the memory by part."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.sizes import render_bytes, render_seconds
from echelon.ground.stored import read_as, write_json
from echelon.ground.variables import QUOTE_VARIABLE
from echelon.planner.forecast import FEWEST_SECONDS, FEWEST_STEPS, MOST_SPREAD, record_run, render_usd
from echelon.planner.plan import load_plan
from echelon.run.folder.cost import read_spending
from echelon.run.folder.run_folder import RunFolder

_FIRST_STEPS = 3  # of a run, which compile and allocate
_FEWEST, _RECENT = 3, 200  # steps that are compared
_MANY_TIMES = 2.0  # from this factor on, a difference is said as a factor and not in per cent

_DURATIONS = ("step_seconds", "hours", "quoted_hours")
_LABELS = {
    "step_seconds": "step",
    "tokens_per_second": "tokens per second",
    "hours": "all steps",
    "usd": "cost of all steps",
    "quoted_hours": "quote: hours",
    "quoted_usd": "quote: cost",
    "memory_total": "memory of tensors",
}


@dataclass(frozen=True)
class Reckoning:
    """Values by name, predicted and measured; the names of bytes begin with `memory`.

    Attributes:
        num_steps: all that were measured.
        seconds: of these steps together.
        spread: the interquartile range of the times over their median, of the steps that are compared.
        quote: what `echelon plan --quote` said about a run that has reached its end, as in `read_quote`.
    """

    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    num_steps: int = 0
    seconds: float = 0.0
    spread: float = 0.0
    quote: Mapping[str, float] = field(default_factory=dict)

    @property
    def differences(self) -> dict[str, float]:
        """Measured over predicted, less 1; without what was predicted as 0."""
        return {name: self.measured[name] / value - 1 for name, value in self.predicted.items() if value}

    def to_dict(self) -> dict[str, Any]:
        """The fields of the event `reckoning`, and of estimate.json."""
        return {"predicted": dict(self.predicted), "measured": dict(self.measured), "differences": self.differences}

    def describe(self) -> Iterator[str]:
        """A table of time and cost; that of memory is printed with the rehearsal's."""
        if rows := list(list_compared(self.predicted, self.measured)):
            for name, predicted, measured, difference in (("this run", "predicted", "measured", "difference"), *rows):
                yield f"{name:<18}{predicted:>12}{measured:>12}   {difference}"
        for name, label in (("hours", "time"), ("usd", "cost")):
            if (used := self.measured.get(f"quoted_{name}")) is not None:
                low, high = self.quote[f"low_{name}"], self.quote[f"high_{name}"]
                position = "below" if used < low else "above" if used > high else "within"
                ends = (_render(name, end) for end in (low, high))
                yield f"quote: the {label} is {position} its error bar, {' to '.join(ends)}"


def list_compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, predicted, measured and their difference as text, of time, cost and all memory."""
    for name, label in _LABELS.items():
        if name in predicted and name in measured:
            values = predicted[name], measured[name]
            difference = describe_difference(*values, is_time=name in _DURATIONS)
            yield label, _render(name, values[0]), _render(name, values[1]), difference


def describe_difference(predicted: float, measured: float, is_time: bool = False) -> str:
    """What was measured, as seen from the prediction: 24 % longer, 3.2 % less, 25 times as long, as predicted.

    Everything that compares a prediction with a measurement uses these words. `is_time`: the values are durations.
    """
    if predicted <= 0 or measured <= 0:
        return "as predicted" if measured == predicted else "-"
    ratio = measured / predicted
    more, less, many = ("longer", "shorter", "as long") if is_time else ("more", "less", "as much")
    if ratio >= _MANY_TIMES:
        return f"{_round(ratio)} times {many}"
    if ratio <= 1 / _MANY_TIMES:
        return f"{_round(1 / ratio)} times {less}"
    percent = 100 * abs(ratio - 1)
    digits = f"{percent:.{0 if percent >= 9.95 else 1}f}"
    return "as predicted" if float(digits) == 0 else f"{digits} % {more if ratio > 1 else less}"


def _round(factor: float) -> str:
    return f"{factor:.1f}" if factor < 9.95 else f"{factor:,.0f}"


def _render(name: str, value: float) -> str:
    if name.startswith("memory"):
        return render_bytes(round(value))
    if name.endswith("usd"):
        return render_usd(value)
    if name == "tokens_per_second":
        return f"{value:,.0f}"
    return render_seconds(3600 * value if name.endswith("hours") else value)


def read_quote(variables: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The field `quote` of estimate.json: what `echelon plan --accept` told this job; nothing in any other run.

    Raises ConfigError if the variable has no quote.
    """
    if (told := variables.get(QUOTE_VARIABLE)) is None:
        return {}
    try:
        values = {str(name): float(value) for name, value in json.loads(told).items()}
    except (AttributeError, TypeError, ValueError):
        values = {}
    if values.keys() != {f"{end}{name}" for name in ("hours", "usd") for end in ("", "low_", "high_")}:
        raise ConfigError(f"{QUOTE_VARIABLE}={told!r:.80} is no quote; remove it from launch.env.")
    return {"quote": values}


def reckon(folder: RunFolder) -> Reckoning | None:
    """Compare estimate.json with the run so far; None if too few steps are measured, or nothing was predicted.

    Raises OSError or ValueError if the folder cannot be read.
    """
    estimate = read_as(folder.estimate_path, dict[str, Any])
    predicted: dict[str, float] = {}
    measured: dict[str, float] = {}
    times = _add_steps(folder, estimate, predicted, measured)
    quote = _settle_quote(folder, estimate, predicted, measured)
    for event in folder.rows.read_events()[::-1]:
        if event["event"] == "memory":
            for side, values in (("planned", predicted), ("measured", measured)):
                values.update({f"memory_{part}": float(size) for part, size in event[side].items()})
                values["memory_total"] = float(sum(event[side].values()))
            break
    spread = _find_spread(times[-_RECENT:])
    return Reckoning(predicted, measured, len(times), sum(times), spread, quote) if measured else None


def _settle_quote(
    folder: RunFolder, estimate: Mapping[str, Any], predicted: dict[str, float], measured: dict[str, float]
) -> dict[str, float]:
    """Add the hours and dollars of a quote, and what all starts of the run have used; returns the quote.

    Adds nothing before the last step.
    """
    quote: dict[str, float] = estimate.get("quote") or {}
    count, spent = estimate.get("schedule", {}).get("steps"), read_spending(folder)
    if not quote or not count or folder.rows.last_step() < count or not spent.seconds:
        return {}
    for name, used in (("hours", spent.seconds / 3600), ("usd", spent.usd)):
        if used:
            predicted[f"quoted_{name}"], measured[f"quoted_{name}"] = float(quote[name]), used
    return quote


def _find_spread(times: Sequence[float]) -> float:
    if len(times) < _FEWEST:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle


def _add_steps(
    folder: RunFolder, estimate: Mapping[str, Any], predicted: dict[str, float], measured: dict[str, float]
) -> list[float]:
    """Add seconds of a step, tokens per second, hours and dollars of all steps. Returns the seconds of each step."""
    seconds = estimate.get("seconds")
    rows = [row for row in folder.read_metrics().rows if _is_measured(row)]
    if not seconds or len(rows) < _FEWEST:
        return []
    recent = rows[-_RECENT:]
    step = statistics.median(row["step_seconds"] for row in recent)
    tokens = statistics.median(row["step_seconds"] * (row.get("tokens_per_second") or 0.0) for row in recent)
    spent, count = read_spending(folder), estimate.get("schedule", {}).get("steps")
    for seconds_of_step, values in ((float(seconds["step"]), predicted), (step, measured)):
        values["step_seconds"] = seconds_of_step
        if tokens:
            values["tokens_per_second"] = tokens / seconds_of_step
        if count:
            values["hours"] = seconds_of_step * count / 3600
            if spent.usd and spent.seconds:
                values["usd"] = seconds_of_step * count * spent.usd / spent.seconds
    return [row["step_seconds"] for row in rows]


def _is_measured(row: Mapping[str, Any]) -> bool:
    return bool(row["kind"] == "train" and row["step"] > _FIRST_STEPS and row.get("step_seconds"))


def store_reckoning(folder: RunFolder, reckoning: Reckoning, step: int) -> None:
    """Write it to events.jsonl and into estimate.json. Raises OSError or ValueError."""
    folder.rows.append_event("reckoning", step=step, **reckoning.to_dict())
    stored = read_as(folder.estimate_path, dict[str, Any])
    write_json(folder.estimate_path, stored | {"reckoning": reckoning.to_dict()})


def sharpen_later_plans(folder: RunFolder, reckoning: Reckoning, cache_dir: Path) -> str | None:
    """Keep the run for later plans of its model on its devices; returns the message about it.

    None if nothing was predicted. Raises OSError or ValueError.
    """
    history = read_as(folder.estimate_path, dict[str, Any]).get("history")
    if not history or not reckoning.num_steps:
        return None
    if (reason := _find_reason_against(reckoning)) is not None:
        return f"later plans: not corrected by this run: {reason}"
    predicted = reckoning.predicted["step_seconds"] / history["factor"]
    measured = reckoning.measured["step_seconds"]
    run = record_run(cache_dir, history["key"], str(folder.path), load_plan(folder.plan_path), predicted, measured)
    return f"later plans of this model on such devices: corrected by a factor of {run.factor:.2f}, measured in this run"


def _find_reason_against(reckoning: Reckoning) -> str | None:
    """Why a run must not correct later plans: it was short, or its steps took very different times."""
    if reckoning.num_steps < FEWEST_STEPS:
        return f"{reckoning.num_steps} steps were measured, at least {FEWEST_STEPS} are needed"
    if reckoning.seconds < FEWEST_SECONDS:
        measured = f"the measured steps took {render_seconds(reckoning.seconds)}"
        return f"{measured}, at least {FEWEST_SECONDS:g} s are needed"
    if reckoning.spread > MOST_SPREAD:
        return (
            f"its step times are uneven: those of the middle half differ by {reckoning.spread:.0%} of the median, at "
            f"most {MOST_SPREAD:.0%} are allowed; other programs may have used the machine"
        )
    return None


def describe_accuracy(paths: Sequence[Path]) -> Iterator[str]:
    """A table of measured against predicted in these runs, and the median difference without its direction.

    Raises ConfigError for a folder without a reckoning.
    """
    reckonings = {path: _require(path) for path in paths}
    names = ("step_seconds", "memory_total")
    width = max(len(str(path)) for path in (*paths, "median difference"))
    yield f"{'run':<{width}}" + "".join(f"{_LABELS[name]:>22}" for name in names)
    for path, reckoning in reckonings.items():
        words = {
            label: difference for label, _, _, difference in list_compared(reckoning.predicted, reckoning.measured)
        }
        yield f"{path!s:<{width}}" + "".join(f"{words.get(_LABELS[name], '-'):>22}" for name in names)
    differences = [
        [abs(reckoning.differences[name]) for reckoning in reckonings.values() if name in reckoning.differences]
        for name in names
    ]
    cells = (f"{100 * statistics.median(errors):.1f} %" if errors else "-" for errors in differences)
    yield f"{'median difference':<{width}}" + "".join(f"{cell:>22}" for cell in cells)


def _require(path: Path) -> Reckoning:
    try:
        reckoning = reckon(RunFolder(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a run folder with an estimate ({error}); give the folders of runs."
        ) from error
    if reckoning is None:
        raise ConfigError(
            f"{path} has nothing to compare: fewer than {_FEWEST} measured steps, or devices of unknown speed."
        )
    return reckoning
