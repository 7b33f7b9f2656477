"""Answers of the next step in a checkpoint: what cannot be used is told, or drawn anew."""

import base64
import io
import math
from types import SimpleNamespace

import pytest
import torch

from echelon.ground.errors import CheckpointError
from echelon.learn.answers.rollouts import Played
from echelon.learn.data.loader import BatchPlace
from echelon.run.training.answers import unpack

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
