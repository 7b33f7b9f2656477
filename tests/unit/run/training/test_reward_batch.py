"""Which answers of a step are trained on, with which advantages: by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from echelon.learn.answers.judging import Rewarded
from echelon.learn.answers.rollouts import Played, Rollouts
from echelon.learn.data.loader import BatchPlace
from echelon.learn.data.shards import NO_LABEL
from echelon.run.training import reward_loop
from echelon.run.training.answers import Drawn
from echelon.run.training.reward_loop import build_batch
from tests.unit.recipe_samples import DEMO, load_text

NAN = math.nan
RECIPE = DEMO + "objective: {name: grpo, advantage: centered}\nreward: exact\n"
REWARDS = torch.tensor([0.0, 1.0, 2.0, 3.0, 3.0, 3.0], dtype=torch.float64)
ENDED = [True, False, True, True, True, True]


def test_the_lengths_of_answers_that_ended_are_those_of_all_ranks(monkeypatch):
    """On this rank 1 and 3 tokens of the model's ended, on another 5; two ranks have the same answers."""
    others = [(1, [5.0]), (0, [1.0, 3.0])]
    monkeypatch.setattr(reward_loop, "gather_objects", lambda own, group: [own, *others])
    played = Played([[True], [True, True, False, True], [True, True]], [0.0] * 3, [1, 2, 1])
    rollouts = Rollouts([[3]] * 3, [[5], [5] * 4, [5] * 2], [], [], [True, True, False], BatchPlace(3), 3, played)
    learner = SimpleNamespace(meshes=SimpleNamespace(everyone=None))
    found = reward_loop.measure_ended(learner, rollouts)
    assert found == {"ended_tokens": 3.0, "ended_tokens_min": 1.0, "ended_tokens_max": 5.0}
    others[:] = []
    assert all(map(math.isnan, reward_loop.measure_ended(learner, replace(rollouts, ended=[False] * 3)).values()))


def batch_of(folder, rewards, *settings, length=2):
    """A batch of two groups of three answers, each of a prompt of two tokens."""
    recipe, _ = load_text(
        folder, RECIPE, "rollout.group_size=3", "train.global_batch_size=6", *settings, "rollout.max_new_tokens=4"
    )
    scores = [torch.full((length,), -1.0)] * 6
    place = BatchPlace(6)
    answers = [[5] * length] * 6
    drawn = Drawn(0, [], Rollouts([[3, 4]] * 6, answers, scores, scores, ENDED, place, 6), scores)
    [batch] = build_batch(recipe, drawn, Rewarded([""] * 6, rewards, {}, ())).microbatches
    return (batch.labels != NO_LABEL).any(1).tolist(), batch.extra["advantages"]


@pytest.mark.parametrize(
    ("settings", "rewards", "trained", "advantages"),
    [
        ([], REWARDS, [1, 1, 1, 1, 1, 1], [-1, 0, 1, 0, 0, 0]),
        (["rollout.skip=[truncated]"], REWARDS, [1, 0, 1, 1, 1, 1], [-1, 0, 1, 0, 0, 0]),
        (["rollout.skip=[uniform]"], REWARDS, [1, 1, 1, 0, 0, 0], [-1, 0, 1, 0, 0, 0]),
        (
            ["rollout.skip=[uniform]"],
            REWARDS.clone().index_fill_(0, torch.tensor([3, 4, 5]), 0.1),
            [1, 1, 1, 0, 0, 0],
            [-1, 0, 1, 0, 0, 0],
        ),
        ([], REWARDS.clone().index_fill_(0, torch.tensor([0]), NAN), [0, 1, 1, 1, 1, 1], [0, -0.5, 0.5, 0, 0, 0]),
    ],
    ids=[
        "all",
        "without cut ones, which count in the mean",
        "without equal ones",
        "without ones of 0.1",
        "one not judged",
    ],
)
def test_answers_that_train_and_their_advantages(tmp_path, settings, rewards, trained, advantages):
    found, values = batch_of(tmp_path, rewards, *settings)
    assert found == [bool(each) for each in trained]
    assert values.flatten().tolist() == pytest.approx(advantages)


def test_answers_of_one_token_have_their_advantages_at_it(tmp_path):
    """As empty ones, which are the stop token alone."""
    found, values = batch_of(tmp_path, REWARDS, length=1)
    assert all(found) and values.sum(1).tolist() == [-1, 0, 1, 0, 0, 0]
