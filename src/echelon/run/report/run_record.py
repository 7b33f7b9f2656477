"""Everything that the files of a run say about it. Files that are missing or damaged count as empty."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.stored import Row, read_json, read_rows, read_text
from echelon.recipe.yaml_text import parse_yaml
from echelon.run.folder.cost import Spending, read_spending
from echelon.run.folder.overview import RunSummary, summarize_run
from echelon.run.folder.run_folder import RunFolder
from echelon.run.report.blocks import read_mapping, read_numbers
from echelon.run.report.trace import Trace, read_traces

_BEGINNINGS = ("start", "resume")


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder at one moment.

    `recipe`, `plan`, `estimate` and `environment` are the documents of these names, empty if unknown. `read_at`: UTC
    seconds. `faults`: lines about files that could not be read.
    """

    name: str
    summary: RunSummary
    recipe: Mapping[str, Any]
    recipe_text: str
    plan: Mapping[str, Any]
    estimate: Mapping[str, Any]
    environment: Mapping[str, Any]
    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    task_rows: Sequence[Row]
    events: Sequence[Row]
    samples: Sequence[Row]
    spending: Spending | None
    traces: Sequence[Trace]
    read_at: float
    faults: Sequence[str]

    def find_events(self, *names: str) -> list[Row]:
        """Return the events of these kinds, in order."""
        return [row for row in self.events if row["event"] in names]

    @property
    def starts(self) -> list[Row]:
        """The events at which processes began to train."""
        return self.find_events(*_BEGINNINGS)

    @cached_property
    def steady_rows(self) -> list[Row]:
        """The train rows without the first of each start and without profiled steps; all if there are no others."""
        left_out = {row["step"] + 1 for row in self.starts if isinstance(row.get("step"), int)}
        for trace in self.traces:
            steps = [step.step for step in trace.steps]
            left_out |= {*range(min(steps) - 1, max(steps) + 2)}  # the profiler starts before, and is written after
        return [row for row in self.train_rows if row["step"] not in left_out] or list(self.train_rows)

    @property
    def wall_seconds(self) -> float | None:
        """Seconds from the first event to the last sign of the run, or to now if it runs; None without events."""
        if not self.events:
            return None
        end = self.read_at if self.summary.status == "running" else max(row["time"] for row in self.events)
        return max(0.0, float(end - self.events[0]["time"]))

    def values(self, name: str) -> list[float]:
        """Return the known values of a field of the steady train rows."""
        return read_numbers(self.steady_rows, name)


def read_record(path: Path, with_traces: bool = True) -> RunRecord:
    """Read a run folder; traces take seconds. Raises ConfigError if it has no events.jsonl."""
    folder = RunFolder(path)
    if not folder.events_path.is_file():
        raise ConfigError(f"{path} is not a run folder: it has no events.jsonl; give runs/NAME.")
    rows = folder.read_metrics().rows
    spending, text = None, ""
    recipe: dict[str, Any] = {}
    traces, unread = read_traces(path) if with_traces else ([], [])
    with suppress(ConfigError):
        spending = read_spending(folder)
    with suppress(OSError, UnicodeDecodeError, ConfigError):
        text = read_text(folder.recipe_path)
        recipe = read_mapping({"": parse_yaml(text, folder.recipe_path.name)[0]}, "")
    return RunRecord(
        name=path.resolve().name,
        summary=summarize_run(path),
        recipe=recipe,
        recipe_text=text,
        plan=_read_document(folder.plan_path),
        estimate=_read_document(folder.estimate_path),
        environment=_read_document(folder.environment_path),
        train_rows=[row for row in rows if row["kind"] == "train"],
        eval_rows=[row for row in rows if row["kind"] == "eval"],
        task_rows=[row for row in rows if row["kind"] == "tasks"],
        events=sorted(folder.rows.read_events(), key=lambda row: row["time"]),
        samples=read_rows(folder.samples_path, _is_sample).rows,
        spending=spending,
        traces=traces,
        read_at=time.time(),
        faults=[*folder.rows.describe_bad_lines(), *unread],
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values is, from 0 to 1, by linear interpolation between ranks."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _read_document(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_mapping({"": read_json(path)}, "")
    return {}


def _is_sample(row: Row) -> bool:
    return isinstance(row.get("step"), int) and all(isinstance(row.get(name), str) for name in ("prompt", "text"))
