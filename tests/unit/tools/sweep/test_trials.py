"""A sweep with a fake launcher: trials that are started, resumed, pruned, refused and reported."""

import csv
import json
import os
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.launch.job import JobRecord, JobSpec, JobStatus, Submitted
from echelon.recipe.load import load_recipe
from echelon.tools.sweep import conduct as session
from echelon.tools.sweep.conduct import StopWord, SweepEnding, check_sweep
from echelon.tools.sweep.trials import find_share, share_machine
from tests.cases import slow
from tests.unit.recipe_samples import SMALL
from tests.unit.tools.sweep.sweep_jobs import EVERY, RANDOM, StubLauncher, loss_of, run, run_killed, values_of


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "draw_plots", lambda *arguments: ([], []))
    return tmp_path


def test_a_sweep_to_its_end(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubLauncher()
    ending, results, _ = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done")
    best = results["trials"][0]
    assert best["parameters"] == {"optim.learning_rate": 1e-3, "optim.weight_decay": 0.0}
    assert best["value"] == EVERY / 40 and best["rank"] == 1 and best["trial"] == results["best"]
    assert {tuple(each.values()) for each in values_of(results).values()} == {
        (rate, decay) for rate in (1e-4, 1e-3, 1e-2) for decay in (0.0, 0.1)
    }
    recipe = load_recipe(Path("sweeps/lr/best.yaml"))[0]
    assert (recipe.optim.learning_rate, recipe.optim.weight_decay, recipe.run.dir) == (1e-3, 0.0, Path("runs/lr-best"))
    trained = load_recipe(Path("sweeps/lr/jobs/000-1/recipe.yaml"))[0]
    assert (trained.run.dir, trained.prepared_dir) == (Path("sweeps/lr/trials/000"), Path("runs/prepared"))
    rows = list(csv.DictReader(Path("sweeps/lr/results.csv").read_text().splitlines()))
    assert [row["eval_loss"] for row in rows] == [str(each["value"]) for each in results["trials"]]
    assert json.loads(Path("sweeps/lr/results.json").read_text()) == results
    assert run(here, monkeypatch, launcher)[:2] == (ending, results) and len(launcher.submitted) == 6


@pytest.mark.parametrize("kill_at", [1, 4])
def test_a_killed_sweep_adopts_its_jobs(here: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int) -> None:
    launcher = StubLauncher(kill_at)
    run_killed(here, monkeypatch, launcher)
    ending, results, _ = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done") and len(results["trials"]) == 6
    assert sorted(launcher.submitted) == [f"{number:03d}" for number in range(6)]


def test_jobs_killed_with_their_sweep_resume_with_their_values(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values_of(run(here, monkeypatch, StubLauncher(), RANDOM, sampler="random", trials=4, name="whole")[1])
    launcher = StubLauncher(2, holds=True)
    run_killed(here, monkeypatch, launcher, RANDOM, sampler="random", trials=4)
    launcher.states = dict.fromkeys(launcher.states, JobStatus("failed", "killed before it wrote its exit code"))
    _, results, _ = run(here, monkeypatch, launcher, RANDOM, sampler="random", trials=4)
    assert sorted(launcher.submitted) == ["000", "000", "001", "001", "002", "003"]
    assert values_of(results) == expected


@pytest.mark.parametrize(
    ("cut", "torn"), [(b'"op_code":4,', b""), (b'"op_code":5,', b'{"op_co')], ids=["no trial", "no value"]
)
def test_a_partially_recorded_trial_gets_the_same_values(
    here: Path, monkeypatch: pytest.MonkeyPatch, cut: bytes, torn: bytes
) -> None:
    _, expected, _ = run(here, monkeypatch, StubLauncher())
    journal = Path("sweeps/lr/journal.log")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: max(index for index, line in enumerate(lines) if cut in line)]) + torn)
    Path("sweeps/lr/journal.log.lock").touch()
    for left in (5, 4):
        for job in Path("sweeps/lr/jobs").glob(f"{left:03d}-*"):
            job.rename(here / f"{cut[-2]}{job.name}")
    _, results, _ = run(here, monkeypatch, StubLauncher())
    assert values_of(results) == values_of(expected)


def test_a_failing_trial_does_not_affect_the_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "train.loss=nan is no number."
    launcher = StubLauncher(fails=lambda recipe: message if recipe.optim.learning_rate > 5e-3 else None)
    ending, results, lines = run(here, monkeypatch, launcher)
    assert ending.state == "done" and len(results["trials"]) == 6
    failed = [each for each in results["trials"] if each["state"] == "failed"]
    assert [each["message"] for each in failed] == [message] * 2
    assert any(line.endswith(f"failed: {message}") for line in lines)


def test_failures_in_a_row_end_the_sweep(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StubLauncher(fails=lambda recipe: "no such file")
    ending, results, _ = run(here, monkeypatch, launcher, max_failures=2, parallel=1)
    assert ending == SweepEnding("failed", "2 failures in a row, the last: trial 1: no such file")
    assert len(launcher.submitted) == 2 and results["best"] is None
    ending, results, _ = run(here, monkeypatch, StubLauncher(), max_failures=2, parallel=1)
    assert ending == SweepEnding("done")
    assert [each["state"] for each in results["trials"]] == ["done"] * 4 + ["failed"] * 2


def test_a_trial_that_does_worse_is_pruned(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = {"optim.learning_rate": [1e-3, 1e-1]}
    first = StubLauncher()
    original = first.submit

    def submit(job: JobSpec) -> Submitted:
        answer = original(job)
        if loss_of(job.recipe) > 1:  # still running when its status is read
            first.states[answer.id] = JobStatus("running")
        return answer

    first.submit = submit  # type: ignore[method-assign]
    text = SMALL.replace("steps: 100", f"steps: 100\n  eval_every: {EVERY}")
    settings = {"pruner": "asha", "seed": 1, "parallel": 1}
    ending, results, lines = run(here, monkeypatch, first, search, text=text, **settings)
    assert ending == SweepEnding("done")
    assert [(each["state"], each["rank"]) for each in results["trials"]] == [("done", 1), ("pruned", None)]
    assert first.cancelled == ["001"] and "trial 1 pruned" in lines


def test_a_stopped_sweep_is_resumed_by_the_next(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, stop = StubLauncher(holds=True), StopWord()
    original = launcher.status

    def status(record: JobRecord) -> JobStatus:
        stop.name = "SIGTERM"
        return original(record)

    launcher.status = status  # type: ignore[method-assign]
    ending, results, _ = run(here, monkeypatch, launcher, stop=stop)
    assert ending == SweepEnding(
        "stopped", "stopped by SIGTERM; its trials have saved; the same command resumes the sweep"
    )
    assert sorted(launcher.cancelled) == ["000", "001"]
    assert [each["state"] for each in results["trials"]] == ["unfinished"] * 2
    launcher.holds, launcher.status = False, original  # type: ignore[method-assign]
    # A job stopped before training begins exits with 1, which is not a failure of the trial either.
    launcher.states["001"] = JobStatus("failed", "exit code 1", 1)
    ending, results, _ = run(here, monkeypatch, launcher)
    assert ending == SweepEnding("done") and [each["state"] for each in results["trials"]] == ["done"] * 6
    assert len(launcher.submitted) == 8


def test_a_job_that_the_killed_sweep_did_not_record_is_waited_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["run.dir=x is in use by a live run (pid 3); wait for it."])
    launcher = StubLauncher(fails=lambda recipe: next(answers, None))
    _, results, _ = run(here, monkeypatch, launcher)
    assert [each["state"] for each in results["trials"]] == ["done"] * 6 and len(launcher.submitted) == 7


def test_another_sweep_is_refused_and_a_longer_one_resumes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(here, monkeypatch, StubLauncher(), RANDOM, sampler="random", trials=2)
    other = {"optim.learning_rate": {"low": 1e-4, "high": 2e-2, "log": True}}
    with pytest.raises(ConfigError, match=r"search.optim.learning_rate: .*high: 0.01.* -> .*high: 0.02"):
        run(here, monkeypatch, StubLauncher(), other, sampler="random", trials=2)
    with pytest.raises(ConfigError, match=r"sweep.trials: 2 -> 1"):
        run(here, monkeypatch, StubLauncher(), RANDOM, sampler="random", trials=1)
    text = SMALL.replace("hidden_size: 64", "hidden_size: 128")
    with pytest.raises(ConfigError, match=r"recipe.yaml: model.config.hidden_size: 64 -> 128"):
        run(here, monkeypatch, StubLauncher(), RANDOM, text=text, sampler="random", trials=3)
    longer = StubLauncher()
    _, results, _ = run(here, monkeypatch, longer, RANDOM, sampler="random", trials=3, parallel=1)
    assert longer.submitted == ["002"] and len(results["trials"]) == 3


def test_a_live_sweep_locks_its_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(here, monkeypatch, StubLauncher())
    folder = check_sweep(Path("sweep.yaml")).folder
    folder.lock()
    with pytest.raises(ConfigError, match=r"sweep.dir=sweeps/lr is in use by a live sweep \(pid \d+"):
        run(here, monkeypatch, StubLauncher())
    folder.unlock()


@pytest.mark.parametrize("sampler", ["qmc", *(slow(name) for name in ("tpe", "cmaes", "gp"))])
def test_every_sampler_resumes_after_a_kill(here: Path, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    search = {**RANDOM, "optim.weight_decay": {"low": 0.0, "high": 0.5}}
    settings = {"sampler": sampler, "trials": 12, "parallel": 1}
    expected = values_of(run(here, monkeypatch, StubLauncher(), search, name="whole", **settings)[1])
    launcher = StubLauncher(6)
    run_killed(here, monkeypatch, launcher, search, **settings)
    _, results, _ = run(here, monkeypatch, launcher, search, **settings)
    assert values_of(results) == expected
    assert len({str(values) for values in expected.values()}) == 12


def test_slots_of_a_machine() -> None:
    cores = tuple(range(7))
    assert [find_share(cores, index, 3) for index in range(3)] == [(0, 1), (2, 3), (4, 5, 6)]
    assert [find_share((0, 1), index, 3) for index in range(3)] == [(0,), (1,), (0,)]
    assert find_share((), 0, 2) == ()


def test_gpus_are_assigned_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    slots = share_machine(2)
    assert [slot.devices for slot in slots] == [("5",), ("3",)]
    with slots[1].held():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
        assert tuple(sorted(os.sched_getaffinity(0))) == slots[1].cores
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,3"
    with pytest.raises(ConfigError, match=r"sweep.parallel=3: .* has 2; use parallel: 2 or less"):
        share_machine(3)


def test_no_two_trials_share_a_remote_address(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(here, monkeypatch, StubLauncher(), text=f"{SMALL}checkpoint: {{remote: file:///backup}}\n")
    paths = [*sorted(Path("sweeps/lr/jobs").glob("*/recipe.yaml"))[:2], Path("sweeps/lr/best.yaml")]
    names = [load_recipe(path)[0].checkpoint.remote for path in paths]
    assert names == ["file:///backup/lr-000", "file:///backup/lr-001", "file:///backup/lr-best"]
