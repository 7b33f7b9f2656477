"""The state of a run about its evaluations."""

import math
from typing import Any

import pytest

from echelon.ground.errors import CheckpointError
from echelon.run.training.state import SavedState, TrainState


def test_the_best_loss_and_early_stopping() -> None:
    state = TrainState(step=10).evaluated(3.0)
    assert (state.best_loss, state.best_step, state.evaluations_since_best) == (3.0, 10, 0)
    worse = state.advanced(1, 1).evaluated(3.0).evaluated(math.nan)
    assert (worse.best_loss, worse.best_step, worse.evaluations_since_best) == (3.0, 10, 2)
    better = worse.advanced(1, 1).evaluated(2.5)
    assert (better.best_loss, better.best_step, better.evaluations_since_best) == (2.5, 12, 0)
    assert TrainState.from_dict(better.to_dict()) == better
    assert TrainState().evaluated(math.inf).best_step is None


def test_losses_of_another_set_are_not_compared() -> None:
    state = TrainState(step=10).evaluated(3.0).evaluated(4.0)
    assert state.judged_by(None) == state
    assert state.judged_by("code") == TrainState(step=10, best_set="code")


def test_an_old_checkpoint_without_evaluation_state() -> None:
    assert TrainState.from_dict({"step": 3, "tokens": 9, "target_tokens": 8}) == TrainState(3, 9, 8)


def test_a_checkpoint_without_any_judge_is_refused() -> None:
    with pytest.raises(CheckpointError, match="judges"):
        SavedState.from_dict({"train": {}, "judges": []})


@pytest.mark.parametrize("train", [{"step": 2**63}, {"step": 2, "suppressed": [-1]}, {"tokens": -5}])
def test_counts_that_no_run_has_are_refused(train: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no valid counters"):
        TrainState.from_dict(train)


def test_a_count_of_bad_steps_that_no_tensor_holds_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"judges.0.in_a_row"):
        SavedState.from_dict({"train": {}, "judges": [{"in_a_row": 10**30}]})
