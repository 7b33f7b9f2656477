"""What follows from the sums of an evaluation, and that nothing does where there was nothing to evaluate."""

import math

import pytest

from echelon.learn.evaluation import EvalResult, EvalResults, build_result
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.run.journal.journal import render_evaluation

NOTHING = EvalResult(None, 0, 2.0, "target_tokens", 0, {"kl": None})


def test_without_a_target_there_is_no_loss():
    found = build_result(CausalLM(), [0.0, 0.0, 0.0], 2.0)
    assert (found.loss, found.perplexity, found.bits_per_byte, found.count) == (None, None, None, 0)
    row = EvalResults({"a": found}).row(3)
    assert (row["loss"], row["perplexity"], row["bits_per_byte"], row["target_tokens"]) == (None, None, None, 0)
    assert row["sets"]["a"]["loss"] is None
    assert render_evaluation(row) == ["eval at step 3: no result: it has no targets"]


def test_a_set_without_targets_leaves_the_others_as_they_are():
    known = [EvalResult(loss, 10 * n, 2.0, "target_tokens", 10 * n, {"kl": loss}) for loss, n in ((2.0, 1), (5.0, 2))]
    whole = EvalResults({"a": known[0], "nothing": NOTHING, "b": known[1]}).whole
    assert whole.loss == pytest.approx((2 * 10 + 5 * 20) / 30) and whole.measures == {"kl": pytest.approx(4.0)}
    assert whole.perplexity == pytest.approx(math.exp(4)) and whole.count == whole.num_targets == 30
    assert whole.bits_per_byte == pytest.approx(4 / math.log(2) / 2)
    lines = render_evaluation(EvalResults({"a": known[0], "nothing": NOTHING}).row(1))
    assert (
        lines[0].startswith("eval at step 1: loss 2.0000  ") and lines[2] == "  nothing: no result: it has no targets"
    )


def test_an_unknown_measure_of_a_set_with_terms_is_unknown_of_all():
    sets = {"a": EvalResult(1.0, 5, None, "pairs", 5, {"x": None}), "b": EvalResult(3.0, 5, None, "pairs", 5, {"x": 1})}
    assert EvalResults(sets).whole.measures == {"x": None} and EvalResults(sets).whole.loss == 2.0


def test_answers_that_nobody_judged_have_no_reward():
    row = EvalResults({"held": EvalResult(None, 0, None, "answers", 0, {"reward": None, "solved": None})}).row(4)
    assert (row["loss"], row["reward"], row["solved"], row["answers"]) == (None, None, None, 0)
    assert render_evaluation(row) == ["eval at step 4: no result: no answer could be judged"]
