"""What a report shows of a run that trains from rewards, of a folder written by hand."""

from echelon.run.report.blocks import Bars, Curves, Table
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report
from tests.unit.tools.report.test_report import find, write_lines, write_run


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
