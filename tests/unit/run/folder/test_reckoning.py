"""Predicted beside measured: the reckoning at the end of a run, from a folder written by hand."""

import json
import re

import pytest

from echelon.cli.commands.plan import plan
from echelon.ground.errors import ConfigError
from echelon.run.folder.reckoning import describe_difference, reckon, store_reckoning
from echelon.run.folder.run_folder import RunFolder
from echelon.run.report.blocks import Table
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report


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
    assert found.differences == pytest.approx({"step_seconds": -0.2, "tokens_per_second": 0.25, "hours": -0.2})
    assert list(found.describe()) == [
        "this run             predicted    measured   difference",
        "step                    2.50 s      2.00 s   20 % shorter",
        "tokens per second          400         500   25 % more",
        "all steps                2h30m       2h00m   20 % shorter",
    ]


@pytest.mark.parametrize(
    ("predicted", "measured", "of_time", "of_others"),
    [
        (0.8773, 1.092, "24 % longer", "24 % more"),
        (4669, 3750, "20 % shorter", "20 % less"),
        (0.0369, 0.952, "26 times as long", "26 times as much"),
        (34722.0, 408.0, "85 times shorter", "85 times less"),
        (1.0, 2.44, "2.4 times as long", "2.4 times as much"),
        (1.0, 1.0312, "3.1 % longer", "3.1 % more"),
        (1.0, 0.9996, "as predicted", "as predicted"),
        (1.0, 8411.8, "8,412 times as long", "8,412 times as much"),
        (0.0, 0.0, "as predicted", "as predicted"),
        (0.0, 1.0, "-", "-"),
    ],
)
def test_a_difference_has_one_direction_and_few_digits(predicted, measured, of_time, of_others):
    assert describe_difference(predicted, measured, is_time=True) == of_time
    assert describe_difference(predicted, measured) == of_others


def test_console_and_report_say_the_same_about_a_run(tmp_path):
    """The table at the end of a run and the section of the report have the same rows."""
    folder = write_run(tmp_path / "r", STEPS, PREDICTED)
    found = reckon(folder)
    assert found is not None
    store_reckoning(folder, found, step=7)
    section = next(each for each in build_report(read_record(folder.path)).sections if each.title.startswith("Predict"))
    [table] = section.blocks
    assert isinstance(table, Table)
    shown = [" ".join(line.split()) for line in found.describe()]
    assert shown[1:] == [" ".join(row) for row in table.rows] and len(table.rows) == 3


def test_dollars_are_those_of_the_price_that_the_run_paid(tmp_path):
    spent = {"seconds": 100.0, "usd": 3.0, "unpriced_machine_seconds": 0.0, "until": 0.0, "reserve_seconds": 0.0}
    found = reckon(write_run(tmp_path / "r", STEPS, PREDICTED, spending=spent))
    assert found is not None
    assert (found.predicted["usd"], found.measured["usd"]) == pytest.approx((270.0, 216.0))


def test_the_memory_is_compared_by_part(tmp_path):
    parts = ({"weights": 100, "other": 60}, {"weights": 100, "other": 100})
    found = reckon(write_run(tmp_path / "r", [], memory=parts))
    assert found is not None
    assert found.differences == pytest.approx({"memory_weights": 0.0, "memory_other": 2 / 3, "memory_total": 0.25})
    assert [line.split()[0] for line in found.describe()] == ["this", "memory"]


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
    assert stored["reckoning"]["differences"]["hours"] == pytest.approx(-0.2)
    assert stored["schedule"] == {"steps": 3600}


def test_the_errors_of_many_runs_are_shown_with_their_median(tmp_path, capsys):
    for name, step in (("a", 2.5), ("b", 1.0), ("c", 2.0)):
        write_run(tmp_path / name, STEPS, {"step": step}, memory=({"weights": 11}, {"weights": 10}))
    plan(tmp_path / "a", [str(tmp_path / "b"), str(tmp_path / "c")], accuracy=True)
    rows = [re.split("  +", line)[-2:] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["step", "memory of tensors"]
    assert rows[1:] == [
        ["20 % shorter", "9.1 % less"],
        ["2.0 times as long", "9.1 % less"],
        ["as predicted", "9.1 % less"],
        ["20.0 %", "9.1 %"],
    ]
    with pytest.raises(ConfigError, match="is not a run folder with an estimate"):
        plan(tmp_path, accuracy=True)
    write_run(tmp_path / "short", STEPS[:4], PREDICTED)
    with pytest.raises(ConfigError, match="fewer than 3 measured steps"):
        plan(tmp_path / "short", accuracy=True)
