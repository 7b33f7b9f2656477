"""What the rewards of a step are described by: worked out by hand, and beside the functions of the standard library."""

import math
import statistics

import pytest
import torch

from echelon.learn.answers.judging import describe_rewards
from echelon.learn.objectives.grpo import advantages_of
from tests.unit.recipe_samples import DEMO, load_text

NAN = math.nan


@pytest.fixture
def recipe(tmp_path):
    text = DEMO + "objective: {name: grpo}\nreward: exact\n"
    return load_text(tmp_path, text, "rollout.group_size=4", "train.global_batch_size=12", "rollout.max_new_tokens=4")[
        0
    ]


def describe(recipe, *groups, **parts):
    rewards = torch.tensor(groups, dtype=torch.float64).flatten()
    return describe_rewards(recipe, rewards, {name: torch.tensor(part).double() for name, part in parts.items()})


def test_the_spread_is_that_of_judged_answers_and_divides_the_advantages(recipe):
    groups = [1.0, 0.0, NAN, 0.5], [0.0, 0.0, 1.0, 1.0], [NAN] * 4
    stats = describe(recipe, *groups)
    by_hand = [statistics.stdev([1.0, 0.0, 0.5]), statistics.stdev([0.0, 0.0, 1.0, 1.0])]
    assert stats.spread == pytest.approx(statistics.fmean(by_hand))
    rewards = torch.tensor(groups[:2], dtype=torch.float64)
    ratio = advantages_of(rewards, "centered")[:, 0] / advantages_of(rewards)[:, 0]
    assert ratio.tolist() == pytest.approx([spread + 1e-4 for spread in by_hand])


def test_means_are_those_of_judged_answers(recipe):
    stats = describe(recipe, [1.0, 0.25, NAN, 0.0], [1.0] * 4, [NAN] * 4, one=[1.0, 0.25, NAN, 3.0, *[1.0] * 8])
    assert stats.reward == pytest.approx(5.25 / 7) and stats.solved == pytest.approx(5 / 7)
    assert stats.unjudged == pytest.approx(5 / 12)
    known = [1.0, 0.25, 3.0, *[1.0] * 8]
    assert stats.parts == {"one": pytest.approx((statistics.fmean(known), statistics.stdev(known)))}
    assert stats.deviation == pytest.approx(statistics.stdev([1.0, 0.25, 0.0, *[1.0] * 4]))


def test_groups_without_two_rewards_that_differ_are_uniform(recipe):
    """Three times 0.1 is not 0.3 in floating point: the mean differs from each."""
    tenth = [0.1, 0.1, 0.1, NAN]
    assert describe(recipe, tenth, [NAN] * 4, [0.0, NAN, NAN, NAN]).uniform == 1.0
    assert describe(recipe, tenth, [0.0, 1e-9, NAN, 0.0]).uniform == 0.5


def test_a_group_with_one_judged_answer_has_no_spread_and_without_any_there_is_none(recipe):
    assert describe(recipe, [1.0, NAN, NAN, NAN]).spread == 0.0
    stats = describe(recipe, [NAN] * 4, one=[NAN] * 4)
    assert stats.unjudged == 1.0
    assert all(map(math.isnan, (stats.reward, stats.solved, stats.spread, stats.parts["one"][0])))
