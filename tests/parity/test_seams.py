"""Engines and synchronizers that echelon does not know train, stop, resume and recover, with no change in training/."""

import inspect
import json
import math
import signal
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from tests.parity.local_sgd import EVERY, LocalSGD
from tests.parity.stand_ins import train_rank_with
from tests.parity.training import EXACT, Row, equal_tensors, prepare, read_rows, tensors_of, with_ranks
from tests.workers import WorkerFailure, WorkerPool

pytestmark = pytest.mark.dist

STEPS = 8
EVERY_STEP, COUNTING = "every_step", "tests.parity.stand_ins:Counting"


def prepared(row, folder, text, replicas=1):
    """The recipe's path and the plan of a run; nothing is trained yet."""
    path, plan = prepare(row, folder, text, STEPS)
    return str(path), replace(plan, num_replicas=replicas, dp_replicate=plan.dp_replicate // replicas)


def train_with(workers, run, engine="native", sync=EVERY_STEP, interruption=None):
    """What each rank ended with, and the diary of rank 0."""
    path, plan = run
    endings = workers.run(train_rank_with, plan.world_size, path, plan, engine, sync, interruption)
    return [error for error, _ in endings], endings[0][1]


def trained(folder):
    return [tuple(row[key] for key in EXACT) for row in read_rows(folder / "run") if row["kind"] == "train"]


def saved_state(folder, step):
    return json.loads((folder / "run" / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


def bigram_row(ranks, **fault):
    changes = {
        "optim": {"learning_rate": 3.0, "max_grad_norm": 1e-1}, "train": {"eval_every": 4}, "fault": fault,
        "checkpoint": {"every": 2}, "evaluate": {"prompts": ["def "], "prompt_tokens": 2},
    }  # fmt: skip
    return with_ranks(Row("ddp", changes=changes), ranks, micro_batch=2)


@pytest.fixture(scope="module")
def bigram(workers, text, tmp_path_factory):
    """Eight steps of the engine without modules on one rank and on two, never interrupted; the folders."""
    folders = {ranks: tmp_path_factory.mktemp(f"bigram{ranks}") for ranks in (1, 2)}
    for ranks, folder in folders.items():
        errors, _ = train_with(workers, prepared(bigram_row(ranks), folder, text), "bigram", COUNTING)
        assert errors == [None] * ranks
    return folders


def test_an_engine_without_modules_learns_and_is_evaluated(bigram):
    one, two = (read_rows(bigram[ranks] / "run") for ranks in (1, 2))
    evaluated = [row for row in one if row["kind"] == "eval"]
    assert [row["step"] for row in evaluated] == [4, 8]
    assert math.log(256) > evaluated[0]["loss"] > evaluated[1]["loss"]
    for ours, theirs in zip(one, two, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours.get("batch_hash") == theirs.get("batch_hash")
    assert (bigram[1] / "run" / "samples.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_stops_it_and_it_goes_on_bit_for_bit(workers, text, tmp_path, bigram, ranks):
    run = prepared(bigram_row(ranks), tmp_path, text)
    errors, diary = train_with(workers, run, "bigram", COUNTING, interruption=(3, signal.SIGTERM))
    assert all(error.startswith("stopped by SIGTERM at step ") for error in errors)
    steps = [line[1] for line in diary if line[0] == "step"]
    assert steps == list(range(1, len(steps) + 1)) and 3 < len(steps) < STEPS
    assert diary[0] == ("start", 0) and diary[-2:] == [("save", len(steps)), ("end",)]
    errors, diary = train_with(workers, run, "bigram", COUNTING)
    assert errors == [None] * ranks
    assert diary[0] == ("start", len(steps)) and diary[-1] == ("end",)
    assert [line for line in diary if line[0] == "evaluation"][-1] == ("evaluation", STEPS)
    assert trained(tmp_path) == trained(bigram[ranks])
    assert equal_tensors(*(tensors_of(folder / "run", STEPS) for folder in (tmp_path, bigram[ranks])))
    assert saved_state(tmp_path, STEPS)["sync"] == {"steps": STEPS}, "the synchronizer's state was not restored"


def test_its_bad_step_is_skipped_or_gone_back_from(workers, text, tmp_path):
    for action in ("skip", "rollback"):
        run = prepared(bigram_row(2, on_bad_step=action), tmp_path / action, text)
        assert train_with(workers, run, "poisoned bigram", COUNTING)[0] == [None, None]
        assert saved_state(tmp_path / action, STEPS)["sync"] == {"steps": STEPS}
    skipped, rolled_back = trained(tmp_path / "skip"), trained(tmp_path / "rollback")
    assert [row[-1] for row in skipped] == [number == 5 for number in range(1, STEPS + 1)]
    assert [row[:4] for row in skipped] == [row[:4] for row in rolled_back]
    assert equal_tensors(*(tensors_of(tmp_path / action / "run", STEPS) for action in ("skip", "rollback")))
    [event] = [
        each for each in map(json.loads, (tmp_path / "rollback/run/events.jsonl").read_text().splitlines())
        if each["event"] == "bad_step"
    ]  # fmt: skip
    assert event["first_nonfinite"] == "the gradient of the table"


def test_an_error_of_a_callback_ends_the_run_and_leaves_its_checkpoints(workers, text, tmp_path, bigram):
    run = prepared(bigram_row(1), tmp_path, text)
    errors, diary = train_with(workers, run, "bigram", COUNTING, interruption=(5, None))
    assert errors == ["division by zero"] and diary[-2:] == [("step", 5), ("end",)]
    assert train_with(workers, run, "bigram", COUNTING)[0] == [None]
    assert trained(tmp_path) == trained(bigram[1])


SPIKES = {"fault": {"on_bad_step": "skip", "spike_factor": 50.0, "spike_window": 3}, "checkpoint": {"every": 4}}


@pytest.fixture(scope="module")
def every_step(workers, text, tmp_path_factory):
    """Two ranks of DDP under the default synchronizer; the folder."""
    folder = tmp_path_factory.mktemp("every_step")
    train_with(workers, prepared(with_ranks(Row("ddp", changes=SPIKES), 2), folder, text))
    return folder


@pytest.mark.parametrize("sync", ["Hesitant", "Late"])
def test_a_repeated_step_and_late_metrics_change_nothing(workers, text, tmp_path, every_step, sync):
    run = prepared(with_ranks(Row("ddp", changes=SPIKES), 2), tmp_path, text)
    errors, diary = train_with(workers, run, sync=f"tests.parity.stand_ins:{sync}")
    assert errors == [None, None]
    assert [line[1] for line in diary if line[0] == "step"] == list(range(1, STEPS + 1))
    assert trained(tmp_path) == trained(every_step)
    for step in (4, STEPS):
        assert equal_tensors(*(tensors_of(folder / "run", step) for folder in (tmp_path, every_step)))
        ours, theirs = (saved_state(folder, step) for folder in (tmp_path, every_step))
        assert (ours["judges"], ours["train"]) == (theirs["judges"], theirs["train"])


LOCAL_SGD = "tests.parity.local_sgd:LocalSGD"
APART = with_ranks(Row("ddp", changes={"checkpoint": {"every": 4, "async": False}}), 2)


@pytest.fixture(scope="module")
def local_sgd(workers, text, tmp_path_factory):
    """Local SGD of two replicas, a process each, never interrupted; the folder."""
    folder = tmp_path_factory.mktemp("local_sgd")
    assert train_with(workers, prepared(APART, folder, text, replicas=2), sync=LOCAL_SGD)[0] == [None, None]
    return folder


def test_local_sgd_saves_the_agreed_model_and_each_replica(local_sgd, every_step):
    """Step 8 is two steps beyond an agreement: the replicas are apart, and the model is the mean as of step 6."""
    assert EVERY == 3 and len(inspect.getsource(LocalSGD).splitlines()) <= 75
    tensors, name = tensors_of(local_sgd / "run", STEPS), "model.model.layers.0.mlp.down_proj.weight"
    ours, theirs, agreed = (tensors[f"{prefix}{name}"] for prefix in ("replica-0000.", "replica-0001.", ""))
    assert not torch.equal(ours, theirs) and not torch.equal(ours, agreed)
    assert not [name for name in tensors if name.startswith("optimizer.")]
    ours, theirs = (
        [row for row in read_rows(each / "run") if row["kind"] == "train"] for each in (local_sgd, every_step)
    )
    assert [row["batch_hash"] for row in ours] == [row["batch_hash"] for row in theirs]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-6) and ours[-1]["loss"] < ours[0]["loss"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=str)
def test_local_sgd_that_was_ended_goes_on_bit_for_bit(workers, text, tmp_path, local_sgd, number):
    """Between two agreements: after step 5, where SIGKILL leaves the checkpoint of step 4."""
    run = prepared(APART, tmp_path, text, replicas=2)
    if number == signal.SIGKILL:
        with closing(WorkerPool(2)) as pool, pytest.raises(WorkerFailure):
            train_with(pool, run, sync=LOCAL_SGD, interruption=(5, number))
        assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000004"]
    else:
        errors, _ = train_with(workers, run, sync=LOCAL_SGD, interruption=(4, number))
        assert all(error.startswith("stopped by SIGTERM at step ") for error in errors)
    assert train_with(workers, run, sync=LOCAL_SGD)[0] == [None, None]
    assert trained(tmp_path) == trained(local_sgd)
    assert equal_tensors(*(tensors_of(folder / "run", STEPS) for folder in (tmp_path, local_sgd)))
