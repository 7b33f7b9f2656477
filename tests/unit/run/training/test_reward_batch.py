"""Which answers of a step are trained on, with which advantages: by hand."""

import math

import pytest
import torch

from echelon.learn.data.loader import BatchPlace
from echelon.learn.data.shards import NO_LABEL
from echelon.learn.judging import Rewarded
from echelon.learn.rollouts import Rollouts
from echelon.run.training.answers import Drawn
from echelon.run.training.reward_loop import build_batch
from tests.unit.recipe_samples import DEMO, load_text

NAN = math.nan
RECIPE = DEMO + "objective: {name: grpo, advantage: centered}\nreward: exact\n"
REWARDS = torch.tensor([0.0, 1.0, 2.0, 3.0, 3.0, 3.0], dtype=torch.float64)
ENDED = [True, False, True, True, True, True]


def batch_of(folder, rewards, *settings, length=2):
    """A batch of two groups of three answers, each of a prompt of two tokens."""
    recipe, _ = load_text(
        folder, RECIPE, "rollout.group_size=3", "train.global_batch_size=6", *settings, "rollout.max_new_tokens=4"
    )
    scores = [torch.full((length,), -1.0)] * 6
    place = BatchPlace(6)
    answers = [[5] * length] * 6
    rollouts = Rollouts([[3, 4]] * 6, answers, scores, scores, ENDED, place, 6)
    drawn = Drawn(0, [], rollouts, scores)
    [batch] = build_batch(recipe, drawn, Rewarded([""] * 6, rewards, {}, ())).microbatches
    return (batch.labels != NO_LABEL).any(1).tolist(), batch.extra["advantages"]


@pytest.mark.parametrize(
    ("settings", "rewards", "trained", "advantages"),
    [
        ([], REWARDS, [1, 1, 1, 1, 1, 1], [-1, 0, 1, 0, 0, 0]),
        (["rollout.skip_truncated=true"], REWARDS, [1, 0, 1, 1, 1, 1], [-1, 0, 1, 0, 0, 0]),
        (["rollout.skip_uniform_groups=true"], REWARDS, [1, 1, 1, 0, 0, 0], [-1, 0, 1, 0, 0, 0]),
        ([], REWARDS.clone().index_fill_(0, torch.tensor([0]), NAN), [0, 1, 1, 1, 1, 1], [0, -0.5, 0.5, 0, 0, 0]),
    ],
    ids=["all", "without cut ones, which count in the mean", "without equal ones", "one not judged"],
)
def test_answers_that_train_and_their_advantages(tmp_path, settings, rewards, trained, advantages):
    found, values = batch_of(tmp_path, rewards, *settings)
    assert found == [bool(each) for each in trained]
    assert values.flatten().tolist() == advantages


def test_answers_of_one_token_have_their_advantages_at_it(tmp_path):
    """As empty ones, which are the stop token alone."""
    found, values = batch_of(tmp_path, REWARDS, length=1)
    assert all(found) and values.sum(1).tolist() == [-1, 0, 1, 0, 0, 0]
