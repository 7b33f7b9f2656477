"""Trials submitted as an array: which sweeps use one, adoption after a kill, restarts, refusals."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job import JobRecord, JobSpec, JobStatus, Submitted
from echelon.launch.records import record_job, write_job
from echelon.tools.sweep import conduct as session
from echelon.tools.sweep.conduct import SweepEnding, check_sweep, plan_arrays, render_first_array
from echelon.tools.sweep.space import Values
from echelon.tools.sweep.trials import Trials
from tests.unit.recipe_samples import SMALL
from tests.unit.tools.sweep.sweep_jobs import GRID, RANDOM, StubLauncher, run, run_killed, values_of

ALL = [f"{number:03d}" for number in range(6)]


@dataclass
class StubArrays(StubLauncher):
    """A stub target that accepts arrays of at most `most` jobs."""

    most: int = 100
    arrays: list[tuple[int, int]] = field(default_factory=list)

    def render_array(self, jobs: Sequence[JobSpec], parallel: int) -> dict[str, str]:
        return {"array.txt": f"{[job.recipe.run.dir.name for job in jobs]}, {parallel} at a time"}

    def launch_array(self, jobs: Sequence[JobSpec], parallel: int) -> list[JobRecord]:
        for job in jobs:
            write_job(job, {})
        if len(jobs) > self.most:
            raise LaunchError("Slurm refused `sbatch`: too many.")
        self.arrays.append((len(jobs), parallel))
        return [record_job(job, self.submit(job)) for job in jobs]

    def submit(self, job: JobSpec) -> Submitted:
        if not self.most:
            raise LaunchError("Slurm refused `sbatch`: Invalid partition name specified")
        return super().submit(job)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "draw_plots", lambda *arguments: ([], []))
    return tmp_path


RATES = {"optim.learning_rate": {"low": 1e-4, "high": 1e-2}, "optim.weight_decay": {"low": 0.0, "high": 0.5}}


@pytest.mark.parametrize(
    ("settings", "search", "at_once", "why"),
    [
        ({"sampler": "grid"}, GRID, 6, "jobs: an array of up to 6, because no trial depends"),
        ({"sampler": "random", "trials": 1000}, RATES, 200, "jobs: an array of up to 200"),
        ({"sampler": "qmc", "trials": 5}, RATES, 5, "jobs: an array of up to 5"),
        ({"sampler": "random", "trials": 1}, RATES, 1, "jobs: one, for one trial"),
        ({"sampler": "tpe", "trials": 5}, RATES, 1, "the values of sweep.sampler=tpe depend on earlier results"),
        ({"sampler": "cmaes", "trials": 5}, RATES, 1, "sweep.sampler=cmaes depend"),
        ({"sampler": "gp", "trials": 5}, RATES, 1, "sweep.sampler=gp depend"),
        ({"sampler": "grid", "pruner": "median"}, GRID, 1, "sweep.pruner=median compares trials"),
        ({"sampler": "grid"}, {"launch.nodes": [1, 2]}, 1, "the same resources, but launch.nodes is searched"),
        ({"sampler": "grid"}, {"fault.notice_seconds": [10, 20]}, 1, "but fault.notice_seconds is searched"),
    ],
)
def test_which_sweeps_use_an_array(
    here: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], search: Any, at_once: int, why: str
) -> None:
    (here / "recipe.yaml").write_text(SMALL)
    text = yaml.safe_dump({"sweep": {"name": "lr", **settings}, "recipe": "recipe.yaml", "search": search})
    (here / "sweep.yaml").write_text(text)
    checked = check_sweep(Path("sweep.yaml"))
    monkeypatch.setattr(session, "find_launcher", lambda target: StubArrays())
    count, line = plan_arrays(checked)
    assert count == at_once and why in line
    monkeypatch.setattr(session, "find_launcher", lambda target: StubLauncher())
    assert plan_arrays(checked) == (1, "")


def test_a_sweep_as_one_array(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubArrays(fails=lambda recipe: "no number." if recipe.optim.learning_rate > 5e-3 else None)
    ending, results, lines = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done")
    assert launcher.arrays == [(6, 2)] and launcher.submitted == ALL
    assert sum(" is submitted as 00" in line for line in lines) == 6
    assert [each["state"] for each in results["trials"]] == ["done"] * 4 + ["failed"] * 2
    assert results["trials"][0]["parameters"] == {"optim.learning_rate": 1e-3, "optim.weight_decay": 0.0}
    assert values_of(results) == values_of(run(here, monkeypatch, StubLauncher(), name="single")[1])
    assert render_first_array(check_sweep(Path("sweep.yaml"))) == {}
    monkeypatch.setattr(session, "find_launcher", lambda target: launcher)
    assert render_first_array(check_sweep(Path("sweep.yaml"))) == {"array.txt": f"{ALL}, 2 at a time"}


def test_a_killed_sweep_adopts_its_array(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubArrays(4)
    run_killed(here, monkeypatch, launcher)
    ending, results, _ = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done") and len(results["trials"]) == 6
    assert launcher.arrays == [(6, 2)] and launcher.submitted == ALL


def test_the_rest_of_an_array_is_another_array(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubArrays(1, holds=True)
    run_killed(here, monkeypatch, launcher)
    launcher.states = {name: JobStatus("stopped", exit_code=3) for name in ALL}
    launcher.states["001"] = JobStatus("done", exit_code=0)
    ending, _, _ = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done")
    assert launcher.arrays == [(6, 2), (5, 2)]
    assert sorted(launcher.submitted) == sorted([*ALL, *ALL[:1], *ALL[2:]])
    assert json.loads(Path("sweeps/lr/jobs/005-2/job.json").read_text())["id"] == "005"


def test_restarts_wait_for_free_slots_of_an_array(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubArrays(1, holds=True)
    run_killed(here, monkeypatch, launcher)
    launcher.submitted = []
    lost = JobStatus("failed", "killed before it wrote its exit code")
    launcher.states |= {"000": lost, "003": lost, "005": lost}
    under_way: list[tuple[str, int]] = []
    original = launcher.status

    def status(record: JobRecord) -> JobStatus:
        answer = original(record)
        if answer.state == "running":
            under_way.append((record.id, len(launcher.submitted)))
            if len(under_way) > 9 and (record.id != "004" or len(launcher.submitted) == 3):
                launcher.states[record.id] = JobStatus("done", exit_code=0)
        return answer

    launcher.status = status  # type: ignore[method-assign]
    ending, results, _ = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done") and [each["state"] for each in results["trials"]] == ["done"] * 6
    assert launcher.arrays == [(6, 2)] and launcher.submitted == ["000", "003", "005"]
    assert {count for name, count in under_way if name != "004"} == {0}  # two running trials leave no slot
    assert under_way[-1] == ("004", 3)


def test_a_refused_array_goes_one_by_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubArrays(most=5)
    ending, results, lines = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done") and [each["state"] for each in results["trials"]] == ["done"] * 6
    assert launcher.arrays == [] and launcher.submitted == ALL
    assert "jobs: one by one, because the array was refused: Slurm refused `sbatch`: too many." in lines


def test_a_target_that_refuses_all_jobs_fails_no_trial(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubArrays(most=0)
    with pytest.raises(LaunchError, match="Invalid partition"):
        run(here, monkeypatch, launcher, RANDOM, sampler="random", trials=5, parallel=9)
    launcher.most = 100
    ending, results, _ = run(here, monkeypatch, launcher, RANDOM, sampler="random", trials=5, parallel=9)
    assert ending == SweepEnding("done") and [each["state"] for each in results["trials"]] == ["done"] * 5
    assert launcher.arrays == [(5, 5)]


def test_a_trial_that_the_recipe_refuses_fails_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trials.job

    def job(self: Trials, number: int, values: Values) -> JobSpec:
        if number == 1:
            raise ConfigError("optim.learning_rate=2 is too much.")
        return original(self, number, values)

    monkeypatch.setattr(Trials, "job", job)
    launcher = StubArrays()
    _, results, _ = run(here, monkeypatch, launcher)
    assert launcher.arrays == [(5, 2)]
    assert [each["message"] for each in results["trials"] if each["state"] == "failed"] == [
        "optim.learning_rate=2 is too much."
    ]


def test_many_trials_are_split_into_several_arrays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MOST_AT_ONCE", 4)
    launcher = StubArrays()
    ending, _, _ = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done")
    assert launcher.arrays == [(4, 2), (2, 2)] and launcher.submitted == ALL
