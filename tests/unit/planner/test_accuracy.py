"""Published measurements of training against the planner's estimates: benchmarks/planner_accuracy.py."""

import statistics
from xml.etree import ElementTree

import pytest

from echelon.planner.rates import GPU_RATES
from planner_accuracy import CONSTANT_MFU, constant_mfu, draw_time, estimate, score_time
from published import Case, Excluded, read_rows
from published_memory import DEEPSPEED, Allocator, count_bytes, fit_allocator, score_memory


def test_every_published_row_is_scored_or_left_out_for_a_reason():
    rows = read_rows()
    assert len(rows) == 477
    assert all(each.reason for each in rows if isinstance(each, Excluded))
    assert sum(isinstance(each, Case) and each.seconds is not None for each in rows) > 300


def test_published_steps_are_predicted_better_than_by_a_constant_mfu():
    """With the constants that are shipped, which were fitted on these rows; `score_time` leaves sources out."""
    cases = [each for each in read_rows() if isinstance(each, Case) and each.seconds is not None]
    errors = sorted(abs(estimate(each, GPU_RATES).total / each.seconds - 1) for each in cases)
    floor = sorted(constant_mfu(cases))
    assert CONSTANT_MFU == 0.42
    assert statistics.median(errors) < 0.06 and statistics.median(floor) > 0.10
    assert errors[int(0.9 * len(errors))] < 0.20 and floor[int(0.9 * len(floor))] > 0.25


def test_the_memory_of_published_runs_is_predicted_without_their_source():
    """The constants of each source are fitted on the rows of the other, so they are not those of all rows."""
    cases = [each for each in read_rows() if isinstance(each, Case)]
    scored, allocators = score_memory(cases)
    assert {source: len(rows) for source, rows in scored.items()} == {"torchtitan": 14, "bsv100": 24, "tr11": 35}
    errors = sorted(abs(ratio - 1) for rows in scored.values() for _, ratio in rows)
    assert statistics.median(errors) < 0.10
    assert errors[int(0.9 * len(errors))] < 0.25
    measured = [each for each in cases if each.memory_bytes is not None]
    assert allocators["tr11"] == fit_allocator([each for each in measured if each.source == "bsv100"])
    assert allocators["bsv100"] == fit_allocator([each for each in measured if each.source == "tr11"])
    assert allocators["torchtitan"] == Allocator() and "torchtitan" not in DEEPSPEED


def test_the_bytes_of_one_published_run_are_those_worked_out_by_hand():
    """bsv100-012: 1.3 B parameters, 8 V100, ZeRO-1, one sequence of 2048 tokens, fp16, no recomputation."""
    (case,) = [each for each in read_rows() if each.row == "bsv100-012"]
    parameters = 24 * (12 * 2048**2 + 13 * 2048) + 50257 * 2048
    activations = 24 * 2048 * 2048 * (34 + 5 * 16 * 2048 / 2048)
    logits = 6 * 2048 * 50257
    assert count_bytes(case) == pytest.approx(parameters * (2 + 2 + 12 / 8) + activations + logits)


@pytest.mark.slow
def test_sources_that_were_not_fitted_are_predicted():
    cases = [each for each in read_rows() if isinstance(each, Case) and each.seconds is not None]
    scored, _ = score_time(cases)
    errors = sorted(abs(ratio - 1) for rows in scored.values() for _, ratio in rows)
    assert statistics.median(errors) < 0.07
    assert errors[int(0.9 * len(errors))] < 0.225


def test_each_published_row_is_a_point_of_the_picture():
    cases = [each for each in read_rows() if isinstance(each, Case) and each.seconds is not None]
    scored = {"a": [(each, 1.5) for each in cases[:5]], "b": [(each, 1.0) for each in cases[5:12]]}
    root = ElementTree.fromstring(draw_time(scored))
    space = "{http://www.w3.org/2000/svg}"
    assert len(list(root.iter(f"{space}circle"))) == 12
    assert {"12 published runs", "a", "b", "as measured"} <= {each.text for each in root.iter(f"{space}text")}
