"""An exhausted budget: the run saves and exits in time, is then refused, and resumes exactly with a higher budget."""

import json
import time

import psutil
import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import exact_rows, read_lines, train_rows, write_recipe
from tests.parity.training import equal_tensors, tensors_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 200
COMMAND = ("train", "recipe.json", "--nproc", "2", "budget.usd_per_hour=3600")


def test_a_budget_ends_a_run_and_a_higher_one_resumes_it(echelon, tmp_path):
    """At a dollar per second, the start alone uses up the first budget: the run ends as soon as it trains."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.1}
    write_recipe(tmp_path, model={"config": config}, train={"steps": STEPS, "log_every": 50}, checkpoint={"every": 60})
    run = RunFolder(tmp_path / "runs" / "tiny")
    first = echelon(*COMMAND, "budget.max_usd=1")
    assert first.code == 3, first
    step = run.newest_step()
    assert step is not None and 0 < step < STEPS
    assert f"stopped by budget.max_usd=1 at step {step}, saved in " in first.err
    assert first.err.rstrip().endswith("raise it to continue")
    assert "cost: $3600/h (budget.usd_per_hour); the duration is unknown until steps are measured" in first.out
    rows = train_rows(run)
    assert rows[-1]["step"] == step
    # The command runs in this process, which is older than the call.
    assert 1 < rows[0]["cost_usd"] <= rows[-1]["cost_usd"] < time.time() - psutil.Process().create_time()
    assert [event["step"] for event in read_lines(run.events_path) if event["event"] == "budget"] == [step]
    used = json.loads(run.spending_path.read_text())

    again = echelon(*COMMAND, "budget.max_usd=1")
    assert again.code == 3 and "stopped by budget.max_usd=1: all starts of the run have used" in again.err
    assert again.seconds < first.seconds / 2 and run.newest_step() == step
    assert json.loads(run.spending_path.read_text()) == used

    raised = echelon(*COMMAND, "budget.max_usd=1000").succeeded()
    assert "at this run's speed" in raised.out and " cost $" in raised.out and " of ~$" in raised.out
    costs = [row["cost_usd"] for row in train_rows(run)]
    assert costs == sorted(costs) and costs[-1] > used["usd"] + 1
    assert echelon(*COMMAND, "run.dir=runs/whole").code == 0
    whole = RunFolder(tmp_path / "runs" / "whole")
    assert exact_rows(run) == exact_rows(whole)
    assert equal_tensors(tensors_of(run.path, STEPS), tensors_of(whole.path, STEPS))
