"""Console output during training: one line per logged step."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields
from typing import Any

from echelon.ground.sizes import render_bytes, render_duration, render_gib
from echelon.planner.memory_parts import MemoryParts

_SAMPLE_WIDTH = 100
# Metrics of training from rewards that only metrics.jsonl and the report have.
_ONLY_IN_ROWS = re.compile(
    r"entropy|mismatch(_\w+)?|(sample|update|reward)_seconds|reward_(\w+_)?std|uniform_groups|ended_tokens\w*|clipped_\w+"
)
# Figures of a train row that are averaged by time, and those that are summed.
_RATES, _TIMES = ("tokens_per_second", "mfu"), ("step_seconds", "data_wait_seconds")


def render_step(
    row: dict[str, Any],
    num_steps: int,
    remaining_seconds: float | None,
    expected_usd: float | None = None,
    further: Iterable[str] = (),
) -> str:
    """Return the console line of a train row: step, loss, norm, rate, speed, MFU, memory, data wait, ETA, cost.

    An unknown MFU is left out. `further`: keys of the row, shown after the norm; of training from rewards, some.
    """
    width = len(str(num_steps))
    seconds = row["step_seconds"]
    wait = None if not seconds else min(1.0, row["data_wait_seconds"] / seconds)
    fields = [
        f"step {row['step']:>{width}}/{num_steps}",
        f"loss {_number(row['loss'], '.4f')}",
        f"grad_norm {_number(row['grad_norm'], '.3f')}",
        *(f"{name} {_number(row[name], '.4g')}" for name in _choose_shown(row, further)),
        f"lr {row['learning_rate']:.2e}",
        f"tok/s {_number(row['tokens_per_second'], '.0f')}",
        *([] if row["mfu"] is None else [f"mfu {_percent(row['mfu'])}"]),
        f"peak_mem {'-' if row['memory_peak_bytes'] is None else render_gib(row['memory_peak_bytes'])}",
        f"wait {_percent(wait)}",
        f"eta {render_duration(remaining_seconds)}",
    ]
    if row.get("cost_usd") is not None:
        whole = "" if expected_usd is None else f" of ~${expected_usd:.2f}"
        bound = "at most " if row.get("cost_at_most") else ""
        fields.append(f"cost {bound}${row['cost_usd']:.2f}{whole}")
    if row["skipped"]:
        fields.append("SKIPPED")
    return "  ".join(fields)


def _choose_shown(row: Mapping[str, Any], further: Iterable[str]) -> list[str]:
    """Return which metrics of a loop a line shows: all of an own loop's, and the most important of rewards."""
    return [name for name in further if "reward_spread" not in row or not _ONLY_IN_ROWS.fullmatch(name)]


class StepAverages:
    """Averages tokens per second, MFU and data wait over the steps since the last console line."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Count a train row."""
        self._rows.append({name: row.get(name) for name in (*_RATES, *_TIMES)})

    def take(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return this row, the last that was added, with the averages in place of its own figures, and start anew."""
        rows, self._rows = self._rows, []
        times = {name: sum(row[name] or 0.0 for row in rows) for name in _TIMES}
        seconds = times["step_seconds"]
        rates = {
            name: sum(row[name] * row["step_seconds"] for row in rows) / seconds
            for name in _RATES
            if seconds and all(row[name] is not None for row in rows)
        }
        return {**row, **times, **rates}


_MEASURES = {
    "kl": ".4f", "agreement": ".1%", "perplexity": ".2f", "bits_per_byte": ".4f", "reward_accuracy": ".1%",
    "reward_margin": ".4f", "accuracy": ".1%", "macro_f1": ".4f",
}  # fmt: skip
"""The metrics of an eval row that the console shows, in this order, and their forms."""


def render_evaluation(row: dict[str, Any]) -> list[str]:
    """Return the console lines of an eval row: the total, and each set if there are several; or of each benchmark."""
    if "tasks" in row:
        return [f"{name} at step {row['step']}: {_metrics(values)}" for name, values in row["tasks"].items()]
    lines = [f"eval at step {row['step']}: {_losses(row)}"]
    if len(row["sets"]) > 1:
        lines += [f"  {name}: {_losses(values)}" for name, values in row["sets"].items()]
    return lines


def render_memory(planned: MemoryParts, measured: MemoryParts) -> list[str]:
    """Return the lines of a table of the memory of tensors by part, with the sums of both columns."""
    names = [*(field.name for field in fields(MemoryParts)), "total"]
    left, right = ([*astuple(parts), sum(astuple(parts))] for parts in (planned, measured))
    rows = [
        (name.replace("_", " "), render_bytes(one), render_bytes(other))
        for name, one, other in zip(names, left, right, strict=True)
        if one or other or name != "frozen_models"
    ]
    head = ("tensors of one process", "planned", "measured")
    return [f"{name:<22}  {plan:>10}  {actual:>10}" for name, plan, actual in (head, *rows)]


def _losses(values: dict[str, Any]) -> str:
    if values["loss"] is None:
        return f"no result: {'no answer could be judged' if 'reward' in values else 'it has no targets'}"
    if "reward" in values:
        solved = f"solved {values['solved']:.1%} of " if "solved" in values else ""
        return f"reward {values['reward']:.4f}  {solved}{values['answers']:,} answers"
    forms = {name: form for name, form in _MEASURES.items() if values.get(name) is not None}
    return "  ".join([f"loss {values['loss']:.4f}", *(f"{name} {values[name]:{form}}" for name, form in forms.items())])


def _metrics(values: Mapping[str, float | None]) -> str:
    """The metrics of a benchmark, each with its standard error."""
    shown = []
    for name, value in values.items():
        metric, comma, chosen = name.partition(",")
        if value is not None and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr{comma}{chosen}")
            shown.append(f"{name} {value:.4f}" + ("" if error is None else f" (+- {error:.4f})"))
    return "  ".join(shown)


def render_sample_line(text: str) -> str:
    """Return the start of a sample as one console line."""
    line = " ".join(text.split())
    return f"  sample: {line if len(line) <= _SAMPLE_WIDTH else line[:_SAMPLE_WIDTH] + '...'}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}%"
