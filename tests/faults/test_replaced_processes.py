"""Processes are killed under `fault.on_lost_process: replace`: the others live on, and the run is that without a loss.

Rows and last weights are those of a run of the same number of processes that lost nothing, bit for bit.
"""

import pytest

from tests.dist.command import EXACT, finish, read_lines, start
from tests.faults.test_quorum import PATIENCE_SECONDS, Job
from tests.faults.test_quorum_plans import LLAMA, lose_while_compiling
from tests.parity.training import equal_tensors, tensors_of

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("marked")]

STEPS = 100
LOST = "process_lost"
MOMENTS = {"save": "a save", "publish": "the publication of a checkpoint", "evaluation": "an evaluation"}


class RankJob(Job):
    """A run of some ranks, of which a lost one is replaced."""

    def __init__(self, folder, ranks, parallel, **sections):
        fault = {"on_lost_process": "replace", "verify_replicas_every": None}
        checkpoint = {"every": 25, "snapshot_every_steps": 4, **sections.pop("checkpoint", {})}
        sections = {"sync": {"name": "every_step"}, "model": LLAMA, **sections}
        super().__init__(folder, STEPS, ranks, parallel=parallel, fault=fault, checkpoint=checkpoint, **sections)

    def lose(self, *ranks):
        """Kill some ranks at once; wait until new processes train in their places, and check that all others live."""
        before, lost = self.run.read_pids(), len(self.events(LOST))
        for rank in ranks:
            self.strike(rank)
        self.until(lambda: len(self.events(LOST)) >= lost + len(ranks))
        self.until(lambda: all(self.run.read_pids().get(rank, before[rank]) != before[rank] for rank in ranks))
        after = self.run.read_pids()
        assert {rank for rank in before if after[rank] != before[rank]} == set(ranks)

    def resumed(self):
        """The steps that the run went on from after losses."""
        return [row["step"] for row in self.events("resume")]


def read_exact(run):
    return [[row.get(key) for key in ("kind", *EXACT)] for row in read_lines(run.metrics_path)]


def is_of_checkpoint(step):
    """Whether there is a checkpoint, and no snapshot, of this step."""
    return step % 25 == 0 and step % 4 != 0


def assert_as_undisturbed(job):
    """Compare a run with another one of the same recipe that loses nothing."""
    assert not job.events("restart", "failure", "save_failed")
    whole = type(job.run)(job.folder / "runs" / "whole")
    plain = ("fault.on_lost_process=restart", "checkpoint.snapshot_every_steps=null", "run.dir=runs/whole")
    command = ("train", "recipe.json", "--nproc", str(job.replicas), *plain)
    finish(start(*command, cwd=job.folder, OMP_NUM_THREADS="1"), PATIENCE_SECONDS).succeeded()
    assert read_exact(job.run) == read_exact(whole)
    assert equal_tensors(tensors_of(job.run.path, STEPS), tensors_of(whole.path, STEPS))


def test_a_lost_process_is_replaced(tmp_path):
    """The first one, which writes the run's files; its state comes from the memory of the other one."""
    job = RankJob(tmp_path, 2, "fsdp", checkpoint={"every": 1000}).begin()
    job.until(lambda: job.last_step() >= 10)
    job.lose(0)
    ending = job.end()
    [step] = job.resumed()
    assert step and step % 4 == 0
    assert f"Resuming from step-{step:08d}, a snapshot in memory." in ending.out
    assert_as_undisturbed(job)
    job.keep_losses("replace, fsdp", "the first process, which writes the run's files")


PLANS = {
    "ddp": ("ddp", 2, {}),
    "zero1": ("zero1", 2, {}),
    "hsdp": ("hsdp", 4, {}),
    "tp": ({"tp": 2}, 2, {}),
    "pp": ({"pp": 2}, 2, {}),
    "fsdp with tp": ({"dp_shard": 2, "tp": 2}, 4, {}),
    "lora": ("fsdp", 2, {"adapter": {"method": "lora", "r": 4}}),
    "diloco": ("ddp", 2, {"sync": {"name": "diloco", "replicas": 2, "every": 5}}),
    "fp16": ("fsdp", 2, {"train": {"precision": "fp16"}}),
    "compiled": ("fsdp", 2, {"train": {"compile": True}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_two_losses_under_each_plan(tmp_path, name):
    parallel, ranks, sections = PLANS[name]
    job = RankJob(tmp_path, ranks, parallel, **sections).begin()
    for step, rank in ((9, ranks - 1), (30, 0)):
        job.until(lambda least=step: job.last_step() >= least)
        job.lose(rank)
    job.end()
    assert_as_undisturbed(job)


@pytest.mark.slow
def test_two_processes_lost_at_once(tmp_path):
    """Of three: the part of one of the two is lost with the process that held it too, so the disk is read."""
    job = RankJob(tmp_path, 3, "fsdp").begin()
    job.until(lambda: job.events("checkpoint") and job.last_step() >= 30)
    job.lose(1, 2)
    job.end()
    assert is_of_checkpoint(*job.resumed())
    assert_as_undisturbed(job)
    job.keep_losses("replace, fsdp", "two processes of three at once")


@pytest.mark.slow
def test_without_snapshots_the_newest_checkpoint_is_read(tmp_path):
    job = RankJob(tmp_path, 2, "fsdp", checkpoint={"snapshot_every_steps": None}).begin()
    job.until(lambda: job.events("checkpoint") and job.last_step() >= 30)
    job.lose(1)
    job.end()
    assert is_of_checkpoint(*job.resumed())
    assert_as_undisturbed(job)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_is_lost_during(tmp_path, moment):
    """Killed while the event is the newest."""
    job = RankJob(tmp_path, 2, "fsdp").begin()
    job.until(lambda: job.events(moment))
    job.lose(0)
    job.end()
    assert_as_undisturbed(job)
    job.keep_losses("replace, fsdp", f"a process, during {MOMENTS[moment]}")


@pytest.mark.slow
def test_a_process_is_lost_during_a_compilation(tmp_path):
    """Of the passes of an evaluation; then the new process, while it compiles its first step."""
    job = RankJob(tmp_path, 2, "fsdp", train={"compile": True}).begin(TORCH_LOGS="dynamo")
    job.until(lambda: job.last_step() >= 3)
    lose_while_compiling(job, 1)
    lose_while_compiling(job, 1, is_starting=True)
    job.end()
    assert_as_undisturbed(job)
    job.keep_losses("replace, fsdp", "a process, during a compilation; then the new one, also")


@pytest.mark.slow
@pytest.mark.parametrize("second", [1, 2], ids=["the new one", "another one"])
def test_a_process_is_lost_during_a_recovery(tmp_path, second):
    job = RankJob(tmp_path, 3, "fsdp").begin()
    job.until(lambda: job.events("checkpoint") and job.last_step() >= 30)
    before = job.run.read_pids()
    job.strike(1)
    job.until(lambda: job.run.read_pids().get(1, before[1]) != before[1])
    job.strike(second, is_starting=second == 1)
    job.end()
    assert job.run.read_pids()[0] == before[0] and {row["rank"] for row in job.events(LOST)} == {1, second}
    assert_as_undisturbed(job)
    job.keep_losses("replace, fsdp", f"a process; during the recovery {'the new' if second == 1 else 'another'} one")


@pytest.mark.slow
def test_all_processes_are_lost(tmp_path):
    """Then the job restarts from the newest checkpoint."""
    job = RankJob(tmp_path, 2, "fsdp").begin()
    job.until(lambda: job.events("checkpoint") and job.last_step() >= 30)
    for rank in range(2):
        job.strike(rank)
    ending = job.end()
    [step] = job.resumed()
    assert is_of_checkpoint(step) and f"restart 1 of 3: from step {step}" in ending.out, ending


@pytest.mark.slow
def test_a_stop_is_obeyed(tmp_path):
    job = RankJob(tmp_path, 2, "fsdp").begin()
    job.until(lambda: job.last_step() >= 10)
    job.strike(1)
    job.process.terminate()
    ending = job.end(code=3)
    assert "stopped by SIGTERM" in ending.err, ending
    job.begin()
    job.end()
    assert_as_undisturbed(job)


@pytest.mark.parametrize(
    ("setting", "words"),
    [("sync={name: parameter_server}", "sync.name=parameter_server"), ("engine=deepspeed", "engine=deepspeed")],
)
def test_refused_with(tmp_path, setting, words):
    RankJob(tmp_path, 2, "ddp", checkpoint={"snapshot_every_steps": None})
    ending = finish(start("train", "recipe.json", setting, cwd=tmp_path), PATIENCE_SECONDS)
    assert ending.code == 2 and words in ending.err and "fault.on_lost_process=replace" in ending.err, ending


def test_refused_under_other_launchers(tmp_path):
    RankJob(tmp_path, 1, "ddp")
    ending = finish(start("train", "recipe.json", cwd=tmp_path, RANK="0", WORLD_SIZE="1"), PATIENCE_SECONDS)
    assert ending.code == 2 and "fault.on_lost_process=replace works only if echelon train starts" in ending.err
