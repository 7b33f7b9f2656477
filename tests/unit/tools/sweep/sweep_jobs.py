"""A fake launcher that does not train, and sweeps that use it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log10
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from echelon.ground.errors import LaunchError
from echelon.launch.job import JobRecord, JobSpec, JobStatus, Launcher, RecordForm, Submitted
from echelon.recipe.load import load_recipe
from echelon.tools.sweep import conduct as session
from echelon.tools.sweep.conduct import StopWord, SweepEnding, check_sweep, run_sweep
from echelon.tools.sweep.trials import TrialSlot
from tests.log_lines import LogLines
from tests.unit.recipe_samples import SMALL

GRID = {"optim.learning_rate": [1e-4, 1e-3, 1e-2], "optim.weight_decay": [0.0, 0.1]}
RANDOM = {"optim.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
EVERY = 10


class Killed(BaseException):
    """Emulates SIGKILL to the sweep; its jobs are unchanged."""


@dataclass
class StubLauncher(Launcher):
    """Writes a known loss instead of training: lowest at a learning rate of 1e-3 without weight decay."""

    record_form: ClassVar = RecordForm(id=".*")
    look_seconds: ClassVar = 0.0

    kill_at: int = 10**9
    fails: Any = lambda recipe: None
    submitted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    states: dict[str, JobStatus] = field(default_factory=dict)
    looks: int = 0
    holds: bool = False

    def check(self, job: JobSpec) -> list[str]:
        return []

    def render(self, job: JobSpec) -> dict[str, str]:
        return {"job.txt": job.name}

    def submit(self, job: JobSpec) -> Submitted:
        recipe = load_recipe(job.recipe_path)[0]
        run = Path(recipe.run.dir)
        name = run.name
        self.submitted.append(name)
        run.mkdir(parents=True, exist_ok=True)
        if message := self.fails(recipe):
            (job.folder / "log").write_text(f"model: 3\nechelon: {message}\nmore\n")
            self.states[name] = JobStatus("failed", "exit code 1", 1)
            return Submitted(name)
        rows = [{"kind": "eval", "step": step, "loss": loss_of(recipe) + EVERY / step} for step in (10, 20, 40)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.states[name] = JobStatus("running") if self.holds else JobStatus("done", exit_code=0)
        return Submitted(name)

    def status(self, record: JobRecord) -> JobStatus:
        self.looks += 1
        if self.looks >= self.kill_at:
            raise Killed
        return self.states[record.id]

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        yield from (record.folder / "log").read_text().splitlines()

    def cancel(self, record: JobRecord) -> None:
        if self.states[record.id].state != "running":
            raise LaunchError("has ended already.")
        self.cancelled.append(record.id)
        self.states[record.id] = JobStatus("stopped", exit_code=3)


def loss_of(recipe: Any) -> float:
    return (log10(recipe.optim.learning_rate) + 3) ** 2 + recipe.optim.weight_decay


def run(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: Any,
    search: Any = GRID,
    stop: StopWord | None = None,
    text: str = SMALL,
    **settings: Any,
) -> tuple[SweepEnding, dict[str, Any], list[str]]:
    (here / "recipe.yaml").write_text(text)
    keys = {"name": "lr", "sampler": "grid", "parallel": 2, **settings}
    (here / "sweep.yaml").write_text(yaml.safe_dump({"sweep": keys, "recipe": "recipe.yaml", "search": search}))
    monkeypatch.setattr(session, "find_launcher", lambda target: launcher)
    lines = LogLines().lines
    checked = check_sweep(Path("sweep.yaml"))
    slots = tuple(TrialSlot(index) for index in range(checked.sweep.sweep.parallel))
    ending, results = run_sweep(checked, slots, stop or StopWord())
    return ending, results, lines


def run_killed(
    here: Path, monkeypatch: pytest.MonkeyPatch, launcher: StubLauncher, *given: Any, **settings: Any
) -> None:
    """Run a sweep that its launcher kills; the next one with it is not killed, and its jobs train to their end."""
    with pytest.raises(Killed):
        run(here, monkeypatch, launcher, *given, **settings)
    launcher.kill_at, launcher.holds = 10**9, False


def values_of(results: dict[str, Any]) -> dict[int, Any]:
    return {each["trial"]: each["parameters"] for each in results["trials"]}
