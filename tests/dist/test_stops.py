"""Signals to any process of a job: all ranks save at the same step, and a resume is exact."""

import os
import signal
import time

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import (
    assert_no_orphan,
    await_line,
    exact_rows,
    finish,
    process_of,
    read_events,
    read_lines,
    start,
    write_recipe,
)
from tests.faults.stories import assert_same

pytestmark = pytest.mark.dist

STEPS = 160
COMMAND = ("train", "recipe.json", "--nproc", "2")


@pytest.fixture
def run(tmp_path):
    """A recipe with dropout that trains for a few seconds; the folder of its run."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.1}
    write_recipe(
        tmp_path, model={"config": config}, train={"steps": STEPS, "log_every": 50, "eval_every": 50},
        checkpoint={"every": 60}, evaluate={"batches": 2},
    )  # fmt: skip
    return RunFolder(tmp_path / "runs" / "tiny")


def last_stop(run):
    return read_events(run, "signal")[-1]


@pytest.mark.slow
def test_stopped_and_resumed_runs_equal_an_uninterrupted_one(echelon, run, tmp_path):
    """SIGTERM to the parent, SIGUSR1 to a rank, Ctrl-C to all; the final result is the same bit for bit."""
    ways = [
        lambda job: job.terminate(),
        lambda job: process_of(run, 1).send_signal(signal.SIGUSR1),
        lambda job: os.killpg(job.pid, signal.SIGINT),
    ]
    done, began = 0, time.time()
    for way, name in zip(ways, ("SIGTERM", "SIGUSR1", "SIGINT"), strict=True):
        job = start(*COMMAND)
        await_line(run.metrics_path, f'"step": {done + 20},', job, seconds=120)
        way(job)
        ending = finish(job, 120)
        assert ending.code == 3, ending
        step = last_stop(run)["step"]
        assert step > done and f"stopped by {name} at step {step}, saved in " in ending.err
        assert f"the newest checkpoint is step {step}, and the same command resumes from it" in ending.err
        assert run.newest_step() == step == exact_rows(run)[-1][0]
        done = step
    assert done < STEPS, "all was done before the last stop"
    time.sleep(1)
    assert echelon(*COMMAND).code == 0
    seconds = [row["seconds"] for row in read_lines(run.events_path) if row["event"] == "goodput"][-1]
    assert sum(seconds.values()) == pytest.approx(time.time() - began, abs=3), seconds
    assert seconds["stopped"] > 1 and seconds["down"] == seconds["redone"] == 0, seconds
    assert echelon(*COMMAND, "run.dir=runs/whole").code == 0
    whole = RunFolder(tmp_path / "runs" / "whole")
    assert len(assert_same(run, whole, STEPS)) == 4


@pytest.mark.slow
def test_an_interrupted_evaluation_is_repeated(echelon, run, tmp_path):
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text() * 40)
    long = (*COMMAND, "train.steps=4", "train.eval_every=2", "evaluate.batches=100000", "data.validation_fraction=0.9")
    job = start(*long)
    await_line(run.metrics_path, '"step": 2,', job, seconds=120)
    time.sleep(0.3)
    job.terminate()
    ending = finish(job, 120)
    assert ending.code == 3 and "stopped by SIGTERM at step 2" in ending.err, ending
    assert not [row for row in read_lines(run.metrics_path) if row["kind"] == "eval"]
    assert echelon(*long).code == 0
    rows = [(row["kind"], row["step"]) for row in read_lines(run.metrics_path)]
    assert rows == [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a second signal", "the end of the notice"])
def test_processes_that_do_not_stop_are_killed(echelon, run, how):
    """A hanging rank prevents the others from saving; the existing checkpoint stays valid."""
    notice = "fault.notice_seconds=60" if how == "a second signal" else "fault.notice_seconds=2"
    job = start(*COMMAND, notice, "checkpoint.every=5")
    await_line(run.metrics_path, '"step": 40,', job, seconds=120)
    process_of(run, 1).suspend()
    saved = run.newest_step()
    job.terminate()
    if how == "a second signal":
        time.sleep(1.5)
        assert job.poll() is None
        job.terminate()
    ending = finish(job, 60)
    assert ending.code == 1 and "stopped by SIGTERM; the newest checkpoint is step" in ending.err, ending
    assert_no_orphan()
    assert run.newest_step() >= saved
    assert echelon(*COMMAND, "checkpoint.every=5").code == 0


LEAVING = '''
import os
from pathlib import Path

import torch.nn.functional as F

calls = 0


def leave_once(logits, labels, extra, rank, mark):
    """Cross-entropy, whose process of this rank, or of any if None, leaves with code 0 in the second step."""
    global calls
    calls += 1
    if calls == 2 and rank in (None, int(os.environ["RANK"])) and not Path(mark).exists():
        Path(mark).touch() if rank is not None else None
        os._exit(0)
    return F.cross_entropy(logits, labels, reduction="sum")
'''


def leave_in_step_2(folder, nproc, rank=None, **sections):
    """The ending of a run whose processes leave by os._exit(0)."""
    (folder / "leaving.py").write_text(LEAVING)
    objective = {"name": "leaving:leave_once", "options": {"rank": rank, "mark": str(folder / "mark")}}
    batch = {"global_batch_size": nproc, "micro_batch_size": 1, "compile": False}
    fault = {"max_restarts": 0, **sections.pop("fault", {})}
    write_recipe(folder, objective=objective, train=batch, fault=fault, **sections)
    job = start("train", "recipe.json", "--nproc", str(nproc), cwd=folder, PYTHONPATH=str(folder))
    return finish(job, 300), RunFolder(folder / "runs" / "tiny")


@pytest.mark.parametrize("nproc", [1, 2])
def test_processes_that_leave_with_0_before_the_end_are_no_success(tmp_path, nproc):
    ending, run = leave_in_step_2(tmp_path, nproc)
    assert ending.code == 1, ending.err
    assert "rank 0 exited with code 0 before the run had ended; see " in ending.err
    events = [row["event"] for row in read_lines(run.events_path)]
    assert events[-1] == "failure" and "done" not in events and not run.is_finished()


def test_a_replaced_process_may_leave_with_0(tmp_path):
    ending, run = leave_in_step_2(tmp_path, 2, rank=1, fault={"on_lost_process": "replace"})
    assert ending.code == 0, ending.err
    assert [row["step"] for row in read_lines(run.metrics_path) if row["kind"] == "train"] == list(range(1, 7))
    lost = next(row for row in read_lines(run.events_path) if row["event"] == "process_lost")
    assert "exited with code 0" in str(lost) and run.is_finished()
