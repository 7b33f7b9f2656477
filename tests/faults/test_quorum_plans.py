"""Processes of replicas that divide the model are killed: the job goes on, with the rows of a run in one process."""

import random
import time
from functools import partial

import pytest

from tests.dist.command import RECIPE, read_lines
from tests.faults.losses import REPLACED
from tests.faults.test_quorum import JOINED, LOST, SEED, Job, assert_never_restarted, assert_same_rows, train_alone

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("marked")]

STEPS = 60
WAITING = {"replicas": 2, "min_replicas": 2}  # the others wait for a lost replica
LORA = {"method": "lora", "r": 4}
LLAMA = RECIPE["model"]["config"]  # it can be divided by tensor parallelism
PLANS = {
    "fsdp": "fsdp",
    "zero1": "zero1",
    "ddp": "ddp",
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}


PlanJob = partial(Job, steps=STEPS, replicas=2, model=LLAMA)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The rows of the run in one process, and its weights."""
    folder = tmp_path_factory.mktemp("alone")
    PlanJob(folder)
    return train_alone(folder), folder


def lose_while_compiling(job, rank, is_starting=False):
    """Kill a process when it begins to compile another function, as its log says with TORCH_LOGS=dynamo."""

    def count():
        return job.run.log_path(rank).read_text().count("start tracing"), len(job.events("evaluated", JOINED, REPLACED))

    traced, passed = count()
    job.until(lambda: (now := count())[0] > traced or now[1] > passed)  # the latter: it was too fast for this process
    job.strike(rank, is_starting=is_starting)


@pytest.mark.parametrize("plan", PLANS)
def test_lost_replicas_return(tmp_path, alone, plan):
    """Both replicas are lost once, and get the state of the other one."""
    job = PlanJob(tmp_path, size=2, parallel=PLANS[plan], sync=WAITING).begin()
    for number, (step, rank) in enumerate(((6, 1), (20, 2))):
        job.until(lambda least=step: job.last_step() >= least)
        job.strike(rank)
        job.until(lambda before=number: len(job.events(JOINED)) > before)
    job.end()
    assert_never_restarted(job, 2)
    assert_same_rows(job.run, alone[0])


def test_fsdp_with_tensor_parallelism(tmp_path, alone):
    job = PlanJob(tmp_path, size=4, parallel={"dp_shard": 2, "tp": 2}, train={"micro_batch_size": 1})
    job.begin()
    job.until(lambda: job.last_step() >= 8)
    job.strike(6)
    job.end()
    assert_never_restarted(job, 1)
    assert_same_rows(job.run, alone[0])


def test_lora_under_fsdp(tmp_path):
    job = PlanJob(tmp_path, size=2, parallel="fsdp", sync=WAITING, adapter=LORA).begin()
    job.until(lambda: job.last_step() >= 8)
    job.strike(1)
    job.until(lambda: job.events(JOINED))
    job.until(lambda: job.last_step() >= 20)  # until it trains, the other one cannot be spared
    job.strike(2)
    job.end()
    assert_never_restarted(job, 2)
    assert_same_rows(job.run, train_alone(tmp_path))


@pytest.mark.parametrize("moment", ["save", "evaluation"])
def test_a_process_is_lost_during(tmp_path, alone, moment):
    """The process that writes the run's files, or its peer: killed while the event is the newest."""
    job = PlanJob(tmp_path, size=2, parallel="fsdp").begin()
    job.until(lambda: job.events(moment))
    job.strike(1)
    job.end()
    assert_never_restarted(job, 1)
    assert_same_rows(job.run, alone[0])
    job.keep_losses("quorum, fsdp x 2", f"a process, during {'an' if moment == 'evaluation' else 'a'} {moment}")


def test_a_process_is_lost_during_a_compilation(tmp_path, alone):
    """Of the passes of an evaluation; then the new process, while it compiles before it joins."""
    job = Job(tmp_path, STEPS, 2, model=LLAMA, train={"compile": True}).begin(TORCH_LOGS="dynamo")
    job.until(lambda: job.last_step() >= 3)
    lose_while_compiling(job, 1)
    lose_while_compiling(job, 1, is_starting=True)
    job.end()
    assert not {"restart", "failure"} & {event["event"] for event in job.events()}
    rows = read_lines(job.run.metrics_path)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone[0]], rel=1e-4)
    job.keep_losses("quorum, ddp", "a process, during a compilation; then the new one, also")


def test_a_replica_is_lost_again_while_it_joins(tmp_path, alone):
    job = PlanJob(tmp_path, size=2, parallel="fsdp").begin()
    job.until(lambda: job.last_step() >= 5)
    old = job.run.read_pids()[3]
    job.strike(2)
    job.until(lambda: job.run.read_pids().get(3, old) != old)
    time.sleep(random.Random(SEED).uniform(0, 1))
    job.strike(3, is_starting=True)
    job.end()
    assert job.events(LOST) and not {"restart", "failure"} & {event["event"] for event in job.events()}
    assert_same_rows(job.run, alone[0])
    job.keep_losses("quorum, fsdp x 2", "a process, and the one that starts in its place")


def test_a_signal_stops_all_and_the_run_resumes(tmp_path, alone):
    job = PlanJob(tmp_path, size=2, parallel="fsdp").begin()
    job.until(lambda: job.last_step() >= 10)
    job.process.terminate()
    job.end(code=3)
    job.begin()
    job.until(lambda: job.last_step() >= job.run.newest_step() + 3)
    job.strike(0)
    job.end()
    assert len(job.events("resume")) == 1 and not job.events("restart")
    assert_same_rows(job.run, alone[0])
