"""Predicted beside measured: the reckoning at the end of a run, from a folder written by hand."""

import json

import pytest

from echelon.commands.plan import plan
from echelon.errors import ConfigError
from echelon.runs.reckoning import reckon, store_reckoning
from echelon.runs.run_folder import RunFolder


def write_run(path, step_seconds, seconds=None, memory=None, spending=None):
    folder = RunFolder(path)
    folder.create()
    estimate = {"memory": {}, "schedule": {"steps": 3600}, "seconds": seconds}
    folder.estimate_path.write_text(json.dumps(estimate))
    rows = [
        {"kind": "train", "step": step, "loss": 1.0, "step_seconds": each, "tokens_per_second": 1000 / each}
        for step, each in enumerate(step_seconds, start=1)
    ]
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if memory is not None:
        folder.rows.append_event("memory", step=0, planned=memory[0], measured=memory[1])
    if spending is not None:
        folder.spending_path.write_text(json.dumps(spending))
    return folder


STEPS = [60.0, 9.0, 9.0, 2.0, 2.0, 2.0, 8.0]  # the first ones compile
PREDICTED = {"step": 2.5, "matmul": 2.0, "overhead": 0.5}


def test_the_time_is_the_median_after_the_first_steps(tmp_path):
    found = reckon(write_run(tmp_path / "r", STEPS, PREDICTED))
    assert found is not None
    assert found.predicted == {"step_seconds": 2.5, "tokens_per_second": 400.0, "hours": 2.5}
    assert found.measured == {"step_seconds": 2.0, "tokens_per_second": 500.0, "hours": 2.0}
    assert found.errors == pytest.approx({"step_seconds": 0.25, "tokens_per_second": -0.2, "hours": 0.25})
    lines = list(found.describe())
    assert lines[0].split() == ["reckoning", "predicted", "measured", "error"]
    assert lines[1].split() == ["step", "seconds", "2.5", "2", "+25.0%"]


def test_dollars_are_those_of_the_price_that_the_run_paid(tmp_path):
    spent = {"seconds": 100.0, "usd": 3.0, "unpriced_machine_seconds": 0.0, "until": 0.0, "reserve_seconds": 0.0}
    found = reckon(write_run(tmp_path / "r", STEPS, PREDICTED, spending=spent))
    assert found is not None
    assert (found.predicted["usd"], found.measured["usd"]) == pytest.approx((270.0, 216.0))


def test_the_memory_is_compared_by_part(tmp_path):
    parts = ({"weights": 100, "other": 60}, {"weights": 100, "other": 100})
    found = reckon(write_run(tmp_path / "r", [], memory=parts))
    assert found is not None
    assert found.errors == pytest.approx({"memory_weights": 0.0, "memory_other": -0.4, "memory_total": -0.2})
    assert [line.split()[0] for line in found.describe()] == ["reckoning", "memory"]


def test_few_steps_or_an_unknown_speed_are_not_compared(tmp_path):
    assert reckon(write_run(tmp_path / "few", STEPS[:5], PREDICTED)) is None
    assert reckon(write_run(tmp_path / "unknown", STEPS)) is None


def test_it_is_stored_in_the_events_and_beside_the_estimate(tmp_path):
    folder = write_run(tmp_path / "r", STEPS, PREDICTED)
    found = reckon(folder)
    assert found is not None
    store_reckoning(folder, found, step=7)
    event = folder.rows.read_events()[-1]
    assert (event["event"], event["step"], event["measured"]["step_seconds"]) == ("reckoning", 7, 2.0)
    stored = json.loads(folder.estimate_path.read_text())
    assert stored["reckoning"]["errors"]["hours"] == pytest.approx(0.25)
    assert stored["schedule"] == {"steps": 3600}


def test_the_errors_of_many_runs_are_shown_with_their_median(tmp_path, capsys):
    for name, step in (("a", 2.5), ("b", 1.0), ("c", 2.0)):
        write_run(tmp_path / name, STEPS, {"step": step}, memory=({"weights": 11}, {"weights": 10}))
    plan(tmp_path / "a", [str(tmp_path / "b"), str(tmp_path / "c")], accuracy=True)
    rows = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [["+25.0%", "+10.0%"], ["-50.0%", "+10.0%"], ["+0.0%", "+10.0%"], ["25.0%", "10.0%"]]
    with pytest.raises(ConfigError, match="is not a run folder with an estimate"):
        plan(tmp_path, accuracy=True)
    write_run(tmp_path / "short", STEPS[:4], PREDICTED)
    with pytest.raises(ConfigError, match="fewer than 3 measured steps"):
        plan(tmp_path / "short", accuracy=True)
