"""Real sweeps with real training: killed midway and resumed, with failing trials and a pruned one."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.dist.command import MARK, assert_no_orphan, finish, read_lines, start, write_recipe
from tests.waiting import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a small recipe; no process may outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    write_recipe(tmp_path, fault={"max_restarts": 0})
    yield tmp_path
    assert_no_orphan()


def write_sweep(**sections):
    Path("sweep.yaml").write_text(yaml.safe_dump({"recipe": "recipe.json", **sections}))


def last_eval_loss(run):
    losses = [row["loss"] for row in read_lines(run / "metrics.jsonl") if row["kind"] == "eval"]
    return losses[-1] if losses else math.inf


def num_ended():
    path = Path("sweeps/lr/results.json")
    trials = json.loads(path.read_text())["trials"] if path.exists() else []
    return sum(each["state"] != "unfinished" for each in trials)


def test_a_sweep_of_twelve_trials_killed_midway(here):
    # A learning rate of 1e30 makes the weights NaN at the first update.
    rates, decays = [1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e30], [0.0, 0.5]
    write_sweep(
        sweep={"name": "lr", "sampler": "grid", "parallel": 2, "max_failures": 12},
        set={"train.steps": 8, "train.eval_every": 4, "optim.warmup": 1},
        search={"optim.learning_rate": rates, "optim.weight_decay": decays},
    )
    process = start("sweep", "sweep.yaml", cwd=here)
    wait_until(lambda: num_ended() >= 5, 200, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    ending = finish(start("sweep", "sweep.yaml", cwd=here), 300).succeeded()
    assert "were running" in ending.out

    results = json.loads(Path("sweeps/lr/results.json").read_text())
    trials = {each["trial"]: each for each in results["trials"]}
    assert sorted(trials) == list(range(12))
    assert {tuple(each["parameters"].values()) for each in trials.values()} == {(r, d) for r in rates for d in decays}
    for each in trials.values():
        failing = each["parameters"]["optim.learning_rate"] == 1e30
        assert each["state"] == ("failed" if failing else "done")
        assert not failing or "finite" in each["message"]
        events = [row["event"] for row in read_lines(Path(each["run"]) / "events.jsonl")]
        assert events.count("start") == 1 and "resume" not in events  # nothing was trained twice
    losses = {number: last_eval_loss(Path(each["run"])) for number, each in trials.items() if each["state"] == "done"}
    assert {number: trials[number]["value"] for number in losses} == losses
    assert results["best"] == min(losses, key=losses.__getitem__) == results["trials"][0]["trial"]
    best = yaml.safe_load(Path("sweeps/lr/best.yaml").read_text())
    assert best["optim"]["learning_rate"] == trials[results["best"]]["parameters"]["optim.learning_rate"]
    for name in ("history", "parallel_coordinates", "importance"):
        assert (Path("sweeps/lr") / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(Path("sweeps/lr/jobs").iterdir())) == 12


def test_a_worse_trial_is_pruned_and_a_stopped_sweep_resumes(here):
    write_sweep(
        sweep={"name": "p", "sampler": "grid", "pruner": "asha", "seed": 1},
        set={"train.steps": 600, "train.eval_every": 20, "optim.warmup": 1},
        search={"optim.learning_rate": [1e-2, 1e-7]},
    )
    process = start("sweep", "sweep.yaml", cwd=here)
    first = Path("sweeps/p/trials/000/metrics.jsonl")
    wait_until(lambda: first.exists() and first.stat().st_size > 3000, 100, process)
    process.send_signal(signal.SIGTERM)
    ending = finish(process, 60)
    assert ending.code == 3 and "stopped by SIGTERM" in ending.err, ending
    assert_no_orphan()
    saved = len(read_lines(first))

    ending = finish(start("sweep", "sweep.yaml", "--json", cwd=here), 200).succeeded()
    done, pruned = json.loads(ending.out)["trials"]
    assert (done["trial"], done["state"], done["parameters"]["optim.learning_rate"]) == (0, "done", 1e-2)
    assert (pruned["trial"], pruned["state"], pruned["rank"]) == (1, "pruned", None)
    steps = [row["step"] for row in read_lines(first) if row["kind"] == "train"]
    assert steps == list(range(1, 601)) and 0 < saved < len(steps)
    rows = read_lines(Path(pruned["run"]) / "metrics.jsonl")
    assert rows[-1]["step"] < 600  # it saved and ended at its current step
