"""What a report shows of benchmarks during training, and of a run that trains from rewards."""

from echelon.run.journal.journal import render_evaluation
from echelon.run.journal.trackers.tracker import scalars
from echelon.run.report.blocks import Bars, Curves, Table
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


def write_rewarded(folder):
    """Forty steps whose reward rises from 0.1 to 0.49, of two functions, and answers of three steps."""
    path = write_run(folder)
    rows = [
        {
            "kind": "train", "step": step, "tokens": 100 * step, "loss": 0.0, "step_seconds": 1.0,
            "reward": 0.1 + (step - 1) / 100, "solved": 0.0, "reward_spread": 0.5, "answer_tokens": 8.0,
            "reward_exact": 0.2, "reward_short": None if step == 3 else 0.3, "sample_seconds": 0.6,
            "reward_seconds": 0.1, "update_seconds": 0.3,
        }
        for step in range(1, 41)
    ]  # fmt: skip
    rows.append({"kind": "eval", "step": 40, "loss": -0.7, "reward": 0.7, "solved": 0.625})
    write_lines(path / "metrics.jsonl", rows)
    answers = [
        {"step": step, "prompt": "3+4=", "text": text, "reward": reward}
        for step in (1, 11, 21)
        for text, reward in (("7", 1.0), ("8", 0.0), ("8", 0.0), ("hf_aB3dE5fG7hJ9kL1mN3pQ5rS7", None))
    ]
    write_lines(path / "samples.jsonl", answers)
    return path


def test_rewards_have_curves_parts_and_answers(tmp_path):
    report = build_report(read_record(write_rewarded(tmp_path / "a")))
    assert dict(report.figures)["solved"] == "62.5 %"
    curve, parts, measures, times, answers = find(report, "Rewards").blocks
    assert isinstance(curve, Curves) and [line.name for line in curve.series][-1] == "held-out prompts, greedily"
    assert curve.series[-1].points == [(40, 0.7)]
    assert [line.name for line in parts.series] == ["exact", "short"] and len(parts.series[1].points) == 39
    assert isinstance(measures, Table)
    assert measures.rows[0] == ("mean reward", "0.1450", "0.4450")  # means of ten steps: 0.1 to 0.19, 0.4 to 0.49
    assert isinstance(times, Bars) and times.rows == [
        ("a step", [("sampling", 0.6), ("rewards", 0.1), ("updates", 0.3)])
    ]
    assert [row[0] for row in answers.rows] == ["1"] * 3 + ["11"] * 3 + ["21"] * 3
    assert [row[1:] for row in answers.rows[:2]] == [("3+4=", "8", "50.0 %", "0"), ("3+4=", "7", "25.0 %", "1.000")]
    assert answers.rows[2][4] == "none" and "hf_" not in answers.rows[2][2]


def test_a_run_without_rewards_has_no_such_section(tmp_path):
    assert "Rewards" not in {section.title for section in build_report(read_record(write_run(tmp_path / "a"))).sections}
