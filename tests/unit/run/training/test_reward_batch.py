"""Which answers of a step are trained on, with which advantages, by hand; answers of the next step in a checkpoint."""

import base64
import io
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from echelon.ground.errors import CheckpointError
from echelon.learn.answers.judging import Rewarded
from echelon.learn.answers.rollouts import Played, Rollouts
from echelon.learn.data.loader import BatchPlace
from echelon.learn.data.shards import NO_LABEL
from echelon.run.training import reward_loop
from echelon.run.training.answers import Drawn, unpack
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


ROW = ([3, 4], [5, 6, 7], torch.tensor([-1.5, 0.0, -2.5]), True, torch.zeros(3))
TALK = ([True, False, True], math.nan, 2)
JUDGE = SimpleNamespace(prompts=lambda step: [f"prompt of step {step}"])


def learner(rank, size, num_answers):
    recipe = SimpleNamespace(rollout=SimpleNamespace(group_size=2), global_batch_size=num_answers)
    return SimpleNamespace(recipe=recipe, place=BatchPlace(4, rank, size))


def save(rows, failures=()):
    buffer = io.BytesIO()
    torch.save({"rows": rows, "failures": list(failures)}, buffer)
    return {"step": 7, "answers": base64.b64encode(buffer.getvalue()).decode()}


def test_each_rank_has_its_share():
    """Three prompts with two answers each, on two ranks: the first has two of the prompts."""
    rows = [([3, number], *ROW[1:]) for number in range(6)]
    first, second = (unpack(learner(rank, 2, 6), JUDGE, save(rows)) for rank in (0, 1))
    assert [list(prompt) for prompt in first.rollouts.prompts] == [[3, 0], [3, 1], [3, 2], [3, 3]]
    assert [list(prompt) for prompt in second.rollouts.prompts] == [[3, 4], [3, 5]]
    assert first.rollouts.most == second.rollouts.most == 4 and first.rollouts.played is None
    assert first.step == 7 and first.prompts == ["prompt of step 7"]
    assert first.scores[0].tolist() == [0.0] * 3 and second.rollouts.at_temperature[1].tolist() == [-1.5, 0.0, -2.5]


def test_what_an_environment_did_is_there():
    found = unpack(learner(0, 1, 2), JUDGE, save([(*ROW, *TALK)] * 2, ["it is ill."]))
    played = found.rollouts.played
    assert isinstance(played, Played) and list(played.turns) == [2, 2] and played.failures == ["it is ill."]
    assert [list(row) for row in found.rollouts.written] == [[True, False, True]] * 2 and math.isnan(played.earned[0])


def test_answers_of_another_batch_are_drawn_anew():
    assert unpack(learner(0, 1, 4), JUDGE, save([ROW] * 2)) is None
    assert unpack(learner(0, 1, 4), JUDGE, {}) is None


@pytest.mark.parametrize("answers", ["%%", "AAAA", base64.b64encode(b"cos\nsystem\n(S'true'\ntR.").decode()])
def test_damaged_answers_are_told(answers):
    with pytest.raises(CheckpointError, match=r"^state\.json has no valid answers of the next step"):
        unpack(learner(0, 1, 2), JUDGE, {"step": 7, "answers": answers})
