"""Replicas of a quorum are killed at random moments: the job goes on, with the rows of a run in one process.

`test_thousand_losses.py` kills more of them, and of those that divide the model.
ECHELON_FAULTS_SEED sets the seed.
"""

import json
import math
import os
import random
import signal
import time

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import finish, read_lines, start, write_recipe
from tests.faults.losses import JOINED, LOST, Struck
from tests.waiting import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("marked")]

SEED = int(os.environ.get("ECHELON_FAULTS_SEED", "20260801"))
MODEL = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
SERVER = {"name": "parameter_server"}
PAIRS = {"train": "pairs.jsonl", "sequence_len": 64, "document_separator": None}
LOOK_SECONDS = 0.02
PATIENCE_SECONDS = 300


class Job(Struck):
    """A run of some replicas, in a folder, and what a test does to it."""

    def __init__(self, folder, steps, replicas=3, sync=None, size=1, parallel="ddp", **sections):
        """`sync`: the section; without a name, the others train on without a lost replica. Others are changed by keys.

        `size`: the processes of a replica; `parallel`: its plan.
        """
        super().__init__()
        self.replicas, self.size = replicas, size
        self.folder, self.run = folder, RunFolder(folder / "runs" / "tiny")
        train = {
            "steps": steps,
            "global_batch_size": 12,
            "log_every": 20,
            "eval_every": 15,
            **sections.pop("train", {}),
        }
        lost = {} if "name" in (sync or {}) else {"on_lost_process": "continue"}
        write_recipe(
            folder, model={"config": sections.pop("model", MODEL)}, train=train, parallel=parallel,
            checkpoint={"every": 20, **sections.pop("checkpoint", {})},
            sync=sync or {"replicas": replicas},
            fault={"verify_replicas_every": 5, "hang_seconds": 120, **lost, **sections.pop("fault", {})}, **sections,
        )  # fmt: skip
        self.process = None

    def begin(self, *arguments, **environment):
        command = ("train", "recipe.json", "--nproc", str(self.replicas * self.size), *arguments)
        self.process = start(*command, cwd=self.folder, OMP_NUM_THREADS="1", **environment)
        return self

    def events(self, *names):
        rows = read_lines(self.run.events_path) if self.run.events_path.exists() else []
        return [row for row in rows if not names or row["event"] in names]

    def last_step(self):
        return self.run.rows.last_step()

    def until(self, holds):
        wait_until(holds, PATIENCE_SECONDS, self.process, say=lambda: (self.last_step(), self.events(LOST, JOINED)))

    def end(self, code=0):
        ending = finish(self.process, PATIENCE_SECONDS)
        assert ending.code == code, (ending, self.events())
        return ending


def train_alone(folder, *arguments):
    """The same training in one process, without a quorum; its rows."""
    alone = start(
        "train", "recipe.json", "--nproc", "1", "run.dir=runs/alone", "sync={name: every_step}", "parallel=ddp",
        "fault.on_lost_process=restart", *arguments, cwd=folder, OMP_NUM_THREADS="1",
    )  # fmt: skip
    finish(alone, PATIENCE_SECONDS).succeeded()
    return read_lines(RunFolder(folder / "runs" / "alone").metrics_path)


def assert_same_rows(run, alone, last=math.inf):
    """Every row once, in order, of the same batches, and losses within the tolerance of parity.

    `last`: a step at which the run was stopped; only the rows before it are compared.
    """
    rows, alone = ([row for row in each if row["step"] < last] for each in (read_lines(run.metrics_path), alone))
    assert [(row["kind"], row["step"]) for row in rows] == [(row["kind"], row["step"]) for row in alone]
    for row, other in zip(rows, alone, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-5), (row, other)
        if row["kind"] == "train":
            assert all(row[key] == other[key] for key in ("batch_hash", "tokens", "target_tokens", "skipped"))
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def fed(rows):
    """What each step read."""
    return [(row["step"], row["batch_hash"], row["tokens"]) for row in rows if row["kind"] == "train"]


def assert_never_restarted(job, num_lost):
    assert len({event["pid"] for event in job.events(LOST)}) == num_lost, job.events(LOST, JOINED)
    names = [event["event"] for event in job.events()]
    assert names.count("start") == names.count("done") == 1
    assert not {"restart", "resume", "failure", "replicas_differ", "save_failed"} & set(names)


def kill_at_random(job, kills, draw, servers=0):
    """Kill a replica some time after each of these steps, as long as two or more of them train; no server."""
    for step in kills:
        job.until(lambda least=step: job.last_step() >= least)
        job.until(lambda: len(job.events(LOST)) - len(job.events(JOINED)) <= job.replicas - 2)
        time.sleep(draw.uniform(0, 0.1))
        changes = {event["replica"]: event["event"] for event in job.events(LOST, JOINED)}  # the last of each
        lost = len(job.events(LOST))
        replica = draw.choice([each for each in range(servers, job.replicas) if changes.get(each) != LOST])
        job.strike(replica * job.size + draw.randrange(job.size))
        job.until(lambda before=lost: len(job.events(LOST)) > before)


def describe(job):
    """What a test prints: how long the others were held up by each loss."""
    seconds = sorted(event["seconds"] for event in job.events(LOST))
    return f"{len(seconds)} replicas lost; the others went on after {seconds[0]:.2f} to {seconds[-1]:.2f} s"


SHORT = {"steps": 40, "train": {"eval_every": 20}}


@pytest.fixture(scope="module")
def short_rows(tmp_path_factory):
    """The rows of a short run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    Job(folder, **SHORT)
    return train_alone(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "servers"), [(None, 0), (SERVER, 1)], ids=["quorum", "parameter server"])
def test_two_replicas_lost_at_random_moments(tmp_path, short_rows, sync, servers):
    """The second is lost before the first has returned."""
    draw = random.Random(SEED)
    job = Job(tmp_path, **SHORT, sync=sync).begin()
    kill_at_random(job, [draw.randrange(2, 20)] * 2, draw, servers)
    ending = job.end()
    print(describe(job))
    assert_never_restarted(job, 2)
    word = "worker" if servers else "replica"
    for lost in job.events(LOST):
        left = f"1 {word} goes" if lost["replicas"] == 1 else f"{lost['replicas']} {word}s go"
        assert f"; {left} on after step {lost['step']}, " in ending.out
    assert_same_rows(job.run, short_rows)
    job.keep_losses("parameter server" if servers else "quorum, ddp", "two, the second before the first is back")


@pytest.mark.slow
def test_two_lost_replicas_change_nothing_but_time(tmp_path):
    job = Job(tmp_path, 300).begin()  # enough for a return on a busy machine
    job.until(lambda: job.last_step() >= 8)
    job.strike(0)  # the one that writes the run's files
    job.until(lambda: job.events(JOINED))
    job.strike(1)
    job.end()
    print(describe(job))
    assert_never_restarted(job, 2)
    assert [event["replica"] for event in job.events(LOST)] == [0, 1]
    joined = job.events(JOINED)[0]
    assert (joined["replica"], joined["replicas"]) == (0, 3)
    assert_same_rows(job.run, train_alone(tmp_path))
    job.keep_losses("quorum, ddp", "the first process, which writes the run's files; then another one")


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "second"), [(None, 0), (SERVER, 1)], ids=["quorum", "parameter server"])
def test_a_signal_stops_it_while_a_replica_is_lost_and_it_resumes(tmp_path, sync, second):
    job = Job(tmp_path, 90, sync=sync).begin()
    job.until(lambda: job.last_step() >= 10)
    job.process.terminate()
    job.strike(2)
    ending = job.end(code=3)
    step = job.run.newest_step()
    assert step and f"stopped by SIGTERM at step {step}, saved in " in ending.err
    assert not {"restart", "failure"} & {event["event"] for event in job.events()}
    job.begin()
    job.until(lambda: job.last_step() >= step + 5)
    job.strike(second)
    job.end()
    assert len(job.events("resume")) == 1 and not job.events("restart")
    assert_same_rows(job.run, train_alone(tmp_path))


@pytest.mark.slow
def test_below_min_replicas_the_others_wait(tmp_path):
    job = Job(tmp_path, 60, sync={"replicas": 3, "min_replicas": 3}).begin()
    job.until(lambda: job.last_step() >= 10)
    job.strike(1)
    job.end()
    assert_never_restarted(job, 1)
    [lost], [joined] = job.events(LOST), job.events(JOINED)
    assert lost["replicas"] == joined["replicas"] == 3 and lost["step"] == joined["step"]
    assert_same_rows(job.run, train_alone(tmp_path))


@pytest.mark.slow
def test_waiting_for_a_replica_that_starts_slowly_is_no_hang(tmp_path):
    sync = {"replicas": 3, "min_replicas": 3}
    job = Job(tmp_path, 60, sync=sync, fault={"hang_seconds": 5}).begin()
    job.until(lambda: job.last_step() >= 10)
    lost = job.run.read_pids()[1]
    job.strike(1)
    job.until(lambda: job.run.read_pids().get(1, lost) != lost)
    job.strike(1, signal.SIGSTOP)
    time.sleep(12)
    job.strike(1, signal.SIGCONT)
    job.end()
    assert_never_restarted(job, 1)
    assert job.events(LOST)[0]["seconds"] > 10


@pytest.mark.slow
def test_when_all_are_lost_the_job_restarts_from_its_checkpoint(tmp_path):
    job = Job(tmp_path, 60).begin()
    job.until(lambda: job.events("checkpoint"))
    for replica in range(3):
        job.strike(replica)
    job.end()
    assert len(job.events("restart")) == len(job.events("resume")) == 1
    assert_same_rows(job.run, train_alone(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "second"), [(None, 0), (SERVER, 2)], ids=["quorum", "parameter server"])
def test_bad_steps_are_skipped_by_all_replicas(tmp_path, sync, second):
    """Spikes are judged by the norms of earlier steps, which a replica that joins must get too."""
    bad = {"on_bad_step": "skip", "max_bad_steps": 50, "spike_factor": 1.02, "spike_window": 4}
    job = Job(tmp_path, 60, sync=sync, fault=bad).begin()
    job.until(lambda: job.last_step() >= 12)
    job.strike(1)
    job.until(lambda: job.events(JOINED))
    job.strike(second)
    job.end()
    assert_never_restarted(job, 2)
    assert [event["replica"] for event in job.events(LOST)] == [1, second]
    alone = train_alone(tmp_path)
    assert any(row.get("skipped") for row in alone)
    assert_same_rows(job.run, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"train": {"precision": "bf16"}}, id="bf16"),
        pytest.param({"train": {"precision": "fp16"}}, id="fp16"),
        pytest.param({"data": PAIRS, "objective": {"name": "dpo"}}, id="dpo"),
        pytest.param({"train": {"compile": True}}, id="compile"),
        pytest.param({"optim": {"name": "muon", "learning_rate": 1e-3}}, id="muon"),
        pytest.param({"adapter": {"method": "lora", "r": 4}}, id="lora"),
    ],
)
def test_a_lost_replica_changes_nothing_with(tmp_path, sections):
    pairs = [{"prompt": f"{n}+{n}?", "chosen": f"{2 * n}.", "rejected": f"{2 * n} or so."} for n in range(96)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = Job(tmp_path, 60, **sections).begin()
    job.until(lambda: job.last_step() >= 8)
    job.strike(1)
    job.end()
    assert_never_restarted(job, 1)
    rows, alone = read_lines(job.run.metrics_path), train_alone(tmp_path)
    assert [(row["kind"], row["step"], row.get("batch_hash")) for row in rows] == [
        (row["kind"], row["step"], row.get("batch_hash")) for row in alone
    ]
    tolerance = 2e-2 if sections.get("train", {}).get("precision") else 1e-4
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=tolerance)
