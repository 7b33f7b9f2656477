"""What a report, a console, a tracker and a sweep show of benchmarks that ran during training."""

from echelon.run.journal.journal import render_evaluation
from echelon.run.journal.trackers.tracker import scalars
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report
from echelon.tools.sweep.results import measure, read_rows
from echelon.tools.sweep.sweep_file import SweepSettings
from tests.unit.tools.report.test_report import find, write_lines, write_run


def write_tasks(folder):
    """Two runs of two tasks, one of which gives several metrics by a filter."""
    path = write_run(folder)
    rows = [
        {"kind": "tasks", "step": step, "seconds": 1.5, "tasks": {
            "arc_easy": {"acc": acc, "acc_stderr": 0.05},
            "gsm8k": {"exact_match,strict-match": acc / 2, "exact_match_stderr,strict-match": None},
        }}
        for step, acc in ((10, 0.25), (20, 0.5), (30, 0.375))
    ]  # fmt: skip
    write_lines(path / "metrics.jsonl", rows)
    return path, rows


def test_benchmarks_have_curves_and_a_table(tmp_path):
    path, _ = write_tasks(tmp_path / "a")
    curves, table = find(build_report(read_record(path)), "Benchmarks").blocks
    assert [(line.name, line.points) for line in curves.series] == [
        ("arc_easy acc", [(10, 0.25), (20, 0.5), (30, 0.375)]),
        ("gsm8k exact_match,strict-match", [(10, 0.125), (20, 0.25), (30, 0.1875)]),
    ]
    assert table.rows == [
        ("arc_easy", "acc", "0.2500", "0.3750", "0.05000"),
        ("gsm8k", "exact_match,strict-match", "0.1250", "0.1875", "unknown"),
    ]


def test_lines_and_trackers_have_every_metric(tmp_path):
    _, rows = write_tasks(tmp_path / "a")
    assert render_evaluation(rows[0]) == [
        "arc_easy at step 10: acc 0.2500 (+- 0.0500)",
        "gsm8k at step 10: exact_match,strict-match 0.1250",
    ]
    assert scalars(rows[0]) == {
        "tasks/seconds": 1.5,
        "tasks/arc_easy/acc": 0.25,
        "tasks/arc_easy/acc_stderr": 0.05,
        "tasks/gsm8k/exact_match,strict-match": 0.125,
    }


def test_a_sweep_can_rank_by_a_task(tmp_path):
    path, _ = write_tasks(tmp_path / "a")
    settings = SweepSettings(name="s", metric="tasks/gsm8k/exact_match,strict-match")
    assert settings.better == "maximize" and measure(read_rows(path), settings) == 0.1875
    assert measure(read_rows(path), SweepSettings(name="s", metric="tasks/other/acc")) is None
