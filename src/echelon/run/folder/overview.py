"""Finds runs below a folder, and summarizes each: its status, last step, last loss and cost."""

import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.ground.errors import ConfigError
from echelon.ground.file_lock import is_open
from echelon.ground.stored import read_as
from echelon.run.folder.cost import read_spending
from echelon.run.folder.run_folder import RunFolder

RunStatus = Literal["running", "done", "stopped", "failed", "interrupted"]
"""The status of a run.

- running: a process holds the lock of the folder.
- done: it reached its last step, or early stopping ended it.
- stopped: by a signal or a budget; `train` resumes from its newest checkpoint.
- failed: the last event is a failure.
- interrupted: its processes ended without recording an event, for example after a power failure.
"""

RUNS = Path("runs")
"""The folder of runs, unless `run.dir` is another one."""

# The status of a run without a process, by its last event of these kinds.
_ENDINGS: dict[str, RunStatus] = {"signal": "stopped", "budget": "stopped", "failure": "failed"}
_BEGINNINGS = ("prepare", "start", "resume", "restart")


def find_status(folder: RunFolder) -> RunStatus:
    """Return the status of a run, from its lock and its files."""
    if folder.is_held():
        return "running"
    if folder.is_finished():
        return "done"
    events = [row["event"] for row in folder.rows.read_events()]
    last = next((event for event in reversed(events) if event in _ENDINGS or event in _BEGINNINGS), None)
    return _ENDINGS.get(last or "", "interrupted")


@dataclass(frozen=True)
class RunSummary:
    """A run at a glance; None is unknown.

    `step` is the last step with a metrics row, `num_steps` the number planned, `loss` the last training loss.
    `updated_at`: UTC seconds of the last change. `usd`: the cost of all starts. `process`: "PID on HOST" of a live run.
    """

    path: Path
    status: RunStatus
    step: int
    num_steps: int | None
    loss: float | None
    updated_at: float | None
    usd: float | None
    process: str | None

    def to_dict(self) -> dict[str, Any]:
        """The values under their names in JSON, with the name of the folder."""
        return {"name": self.path.name} | asdict(self) | {"path": str(self.path)}

    def describe_progress(self) -> str:
        """Return the step, of how many if known: 120/300."""
        return f"{self.step}" if self.num_steps is None else f"{self.step}/{self.num_steps}"


@dataclass(frozen=True)
class _Estimate:
    """The part of estimate.json that is read here."""

    schedule: dict[str, float]


def summarize_run(path: Path) -> RunSummary:
    """Summarize a run; damaged files count as unknown."""
    folder = RunFolder(path)
    step, num_steps, loss, usd = folder.rows.last_step(), None, None, None
    with suppress(OSError, ValueError, KeyError, OverflowError):
        num_steps = int(read_as(folder.estimate_path, _Estimate).schedule["steps"])
    if step:
        loss = folder.rows.last_loss()
    with suppress(ConfigError):
        usd = read_spending(folder).usd or None
    times = [path.stat().st_mtime for path in (folder.metrics_path, folder.events_path) if path.exists()]
    return RunSummary(
        path, find_status(folder), step, num_steps, loss, max(times, default=None), usd, folder.read_holder()
    )


def find_runs(roots: Iterable[Path]) -> list[Path]:
    """Find the runs in and below folders, by their events.jsonl, sorted; links to folders are not followed."""
    return sorted({path for root in roots for path in _walk(root)})


def find_newest_runs(roots: Iterable[Path]) -> list[Path]:
    """Find the runs in and below folders, the one with the newest event first."""

    def changed_at(path: Path) -> float:
        with suppress(OSError):  # removed meanwhile
            return (path / "events.jsonl").stat().st_mtime
        return 0.0

    return sorted(find_runs(roots), key=changed_at, reverse=True)


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        if "events.jsonl" in files:
            folders.clear()
            yield Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]


def find_run(name: str) -> Path | None:
    """Find a run by its folder, or by its name below `runs`; None if there is none."""
    return next((path for path in (Path(name), RUNS / name) if (path / "events.jsonl").is_file()), None)


def require_run(name: str) -> Path:
    """Return the folder of a run by its path, or by its name below `runs`. Raises ConfigError if there is none."""
    if (path := find_run(name)) is None:
        raise ConfigError(
            f"{name} is not a run: neither it nor {RUNS / name} has an events.jsonl; `echelon runs` lists the runs."
        )
    return path


def require_live_process(path: Path) -> int:
    """Return the id of the process on this machine that holds the lock of a run.

    Raises ConfigError if the run has no process, or one on another machine.
    """
    if (holder := RunFolder(path).read_holder()) is None:
        raise ConfigError(f"{path} is not running; it is {find_status(RunFolder(path))}.")
    pid, _, host = holder.partition(" on ")
    if not pid.isdecimal() or host != platform.node():
        raise ConfigError(
            f"{path} is held by process {holder}, not on this machine ({platform.node()}); stop it there."
        )
    if not is_open(int(pid), path / ".lock"):
        raise ConfigError(f"{path} is held by process {holder}, of another user or container; stop it there.")
    return int(pid)


def render_summaries(runs: Sequence[RunSummary]) -> list[str]:
    """Render a table of runs, one line each below a head."""
    head = ("run", "status", "step", "loss", "updated (UTC)", "cost")
    rows = [head, *(_render_row(run) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _render_row(run: RunSummary) -> tuple[str, ...]:
    updated = "-" if run.updated_at is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.updated_at))
    cost = "-" if run.usd is None else f"${run.usd:.2f}"
    loss = "-" if run.loss is None else f"{run.loss:.4f}"
    return str(run.path), run.status, run.describe_progress(), loss, updated, cost


def describe_run(run: RunSummary) -> str:
    """A line about a run: its status, process, step, last loss and cost."""
    parts = [str(run.path), "train", run.status]
    parts += [] if run.process is None else [f"process {run.process}"]
    parts += [f"step {run.describe_progress()}"]
    parts += [] if run.loss is None else [f"loss {run.loss:.4f}"]
    parts += [] if run.usd is None else [f"cost ${run.usd:.2f}"]
    return "  ".join(parts)
