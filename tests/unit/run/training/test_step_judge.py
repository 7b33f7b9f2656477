"""Decisions about steps, by hand, each rule decisive in at least one; the state of a run about its evaluations."""

import json
import math
from typing import Any

import pytest
import torch

from echelon.ground.errors import CheckpointError
from echelon.learn.engines.engine import NonFinite
from echelon.recipe.operation import FaultConfig
from echelon.run.folder.run_folder import RunFolder
from echelon.run.training.bad_steps import StepJudge, merge_findings
from echelon.run.training.metrics import StepMetrics
from echelon.run.training.rollback import describe_stop, read_suppressed
from echelon.run.training.state import SavedState, TrainState

CPU = torch.device("cpu")
NAN = math.nan


def judge_all(judge, norms, scale=None, suppressed=()):
    """(applied, bad, in a row) of each step."""
    found = []
    for step, norm in enumerate(norms):
        tensor = torch.tensor(norm)
        loss_scale = None if scale is None else torch.tensor(scale)
        verdict = judge(tensor, torch.isfinite(tensor), loss_scale, step in suppressed)
        found.append((bool(verdict.commit), bool(verdict.is_bad), int(verdict.in_a_row)))
    return found


GOOD = (True, False, 0)


def test_after_a_bad_step_nothing_is_applied_until_the_host_has_acted():
    judge = StepJudge(FaultConfig(), CPU)
    assert judge_all(judge, [1.0, NAN, 1.0]) == [GOOD, (False, True, 1), (False, False, 1)]
    judge.load_state_dict({"in_a_row": 0, "norms": []})
    assert judge_all(judge, [1.0]) == [GOOD]


def test_skip_continues_until_too_many_consecutive_bad_steps():
    judge = StepJudge(FaultConfig(on_bad_step="skip", max_bad_steps=2), CPU)
    found = judge_all(judge, [NAN, 1.0, math.inf, NAN, 1.0])
    assert found == [(False, True, 1), GOOD, (False, True, 1), (False, True, 2), (False, False, 2)]


def test_an_overflow_is_not_bad_and_does_not_reset_the_count():
    skip = FaultConfig(on_bad_step="skip")
    assert judge_all(StepJudge(skip, CPU), [NAN, 1.0], scale=1.0) == [(False, False, 0), GOOD]
    judge = StepJudge(skip, CPU)
    assert judge_all(judge, [NAN], scale=0.5) == [(False, True, 1)]
    assert judge_all(judge, [NAN], scale=1.0) == [(False, False, 1)]
    assert judge_all(judge, [NAN], scale=0.5) == [(False, True, 2)]


def test_a_suppressed_step_is_bad_but_triggers_no_action():
    judge = StepJudge(FaultConfig(on_bad_step="rollback"), CPU)
    assert judge_all(judge, [1.0, 1.0, 1.0], suppressed={1}) == [GOOD, (False, True, 1), GOOD]


def test_spikes_by_hand():
    """Window 3, factor 4. The median is taken over applied norms only, and the first three are not judged."""
    judge = StepJudge(FaultConfig(on_bad_step="skip", max_bad_steps=9, spike_factor=4.0, spike_window=3), CPU)
    norms = [1.0, 100.0, 2.0, 8.0, 9.0, 33.0, 36.0]
    # medians: of 1 100 2: 2, so 8 is not above; of 100 2 8: 8; of 2 8 9: 8, so 33 is; of the same again: so is 36
    assert judge_all(judge, norms) == [GOOD, GOOD, GOOD, GOOD, GOOD, (False, True, 1), (False, True, 2)]
    assert judge.state_dict() == {"in_a_row": 2, "norms": [2.0, 8.0, 9.0]}


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_restored_judge_decides_alike(cut):
    fault = FaultConfig(on_bad_step="skip", max_bad_steps=9, spike_factor=1.5, spike_window=4)
    norms = [1.0, 1.1, 0.1 + 0.2, 1.2, 1.7, NAN, 1.6, 2.0, NAN, NAN, 1.0]
    whole = judge_all(StepJudge(fault, CPU), norms)
    first, second = StepJudge(fault, CPU), StepJudge(fault, CPU)
    found = judge_all(first, norms[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + judge_all(second, norms[cut:]) == whole
    assert {commit for commit, _, _ in whole} == {True, False}


def test_a_new_window_keeps_the_newest_norms_and_old_checkpoints_have_none():
    judge = StepJudge(FaultConfig(spike_factor=2.0, spike_window=2), CPU)
    judge.load_state_dict({"in_a_row": 1, "norms": [5.0, 6.0, 7.0]})
    assert judge.state_dict() == {"in_a_row": 1, "norms": [6.0, 7.0]}
    judge.load_state_dict({})
    assert judge.state_dict() == {"in_a_row": 0, "norms": []}


def test_suppressed_steps_are_in_the_state_and_in_the_events(tmp_path):
    state = TrainState(step=4).suppressing([7]).suppressing([3, 7])
    assert state.suppressed == (3, 7)
    assert SavedState.from_dict({"train": json.loads(json.dumps(state.to_dict()))}).train == state
    folder = RunFolder(tmp_path)
    assert read_suppressed(folder) == []
    folder.rows.append_event("bad_step", step=7, action="rollback")
    folder.rows.append_event("rollback", step=4, suppressed=7)
    with folder.events_path.open("a") as file:
        file.write('{"event": "rollback", "sup')
    assert read_suppressed(folder) == [7]


def test_the_first_finding_over_ranks_and_microbatches():
    output, gradient = NonFinite(0, 9, "model.layers.1.mlp"), NonFinite(2, 0, "model.norm")
    diagnosis = merge_findings([[(None, [1, 2]), (gradient, [3, 4])], [(output, [5, 6]), (NonFinite(0, 30, "x"), [7])]])
    assert (diagnosis.finding, diagnosis.ranks, diagnosis.sample_ids) == (output, (1,), (5, 6, 7))
    assert "the output of model.layers.1.mlp, only on rank 1. Samples 5, 6, 7." in diagnosis.describe()
    nothing = merge_findings([[(None, list(range(20)))], [(None, [20])]])
    assert nothing.num_samples == 21 and nothing.sample_ids == tuple(range(16))
    assert nothing.describe().endswith(
        "all values were finite. Samples " + ", ".join(map(str, range(16))) + " and 5 more."
    )


@pytest.mark.parametrize(
    ("norm", "spike_factor", "rule"),
    [
        (NAN, None, "gradient norm=nan, and both must be finite;"),
        (9.0, 4.0, "gradient norm=9, which is more than fault.spike_factor=4 times the median"),
        (9.0, None, "gradient norm=9, and the synchronizer (sync.name) rejected the update;"),
    ],
)
def test_the_message_of_a_stop_names_the_rule(norm, spike_factor, rule):
    metrics = StepMetrics(
        step=6, loss=2.0, router_loss=None, expert_load=None, grad_norm=norm, committed=False, loss_scale=None,
        sent_bytes=0.0, wall_seconds=0.0, own_seconds=[], gpu=None,
        learning_rate=1e-3, tokens=64, target_tokens=60, batch_hash="0", data_wait_seconds=0.0, memory_peak_bytes=None,
        is_bad=True, bad_in_a_row=1, stopped_by=None,
    )  # fmt: skip
    message = describe_stop(metrics, FaultConfig(spike_factor=spike_factor), merge_findings([[(None, [1])]]))
    assert message.startswith("step 7: loss=2 and ")
    assert rule in message


def test_the_best_loss_and_early_stopping() -> None:
    state = TrainState(step=10).evaluated(3.0)
    assert (state.best_loss, state.best_step, state.evaluations_since_best) == (3.0, 10, 0)
    worse = state.advanced(1, 1).evaluated(3.0).evaluated(math.nan)
    assert (worse.best_loss, worse.best_step, worse.evaluations_since_best) == (3.0, 10, 2)
    better = worse.advanced(1, 1).evaluated(2.5)
    assert (better.best_loss, better.best_step, better.evaluations_since_best) == (2.5, 12, 0)
    assert SavedState.from_dict({"train": better.to_dict()}).train == better
    assert TrainState().evaluated(math.inf).best_step is None


def test_losses_of_another_set_are_not_compared() -> None:
    state = TrainState(step=10).evaluated(3.0).evaluated(4.0)
    assert state.judged_by(None) == state
    assert state.judged_by("code") == TrainState(step=10, best_set="code")


def test_an_old_checkpoint_without_evaluation_state() -> None:
    train = {"step": 3, "tokens": 9, "target_tokens": 8}
    assert SavedState.from_dict({"train": train}).train == TrainState(3, 9, 8)


def test_a_checkpoint_without_any_judge_is_refused() -> None:
    with pytest.raises(CheckpointError, match="judges"):
        SavedState.from_dict({"train": {}, "judges": []})


@pytest.mark.parametrize("train", [{"step": 2**63}, {"step": 2, "suppressed": [-1]}, {"tokens": -5}])
def test_counts_that_no_run_has_are_refused(train: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no valid counters"):
        SavedState.from_dict({"train": train})


def test_a_count_of_bad_steps_that_no_tensor_holds_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"judges.0.in_a_row"):
        SavedState.from_dict({"train": {}, "judges": [{"in_a_row": 10**30}]})
