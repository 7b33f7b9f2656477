"""Snapshots in memory: a lost process costs only the steps since the newest one, and the memory is released."""

import pytest

from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.workers import PLACE
from tests.dist import command
from tests.parity.training import equal_tensors, tensors_of

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not PLACE.is_dir(), reason="no /dev/shm here")]

STEPS = 600
COMMAND = ("train", "recipe.json", "--nproc", "2")


@pytest.fixture
def echelon(capfd, monkeypatch, tmp_path):
    """The command in a temporary folder; no process outlives the test, and no shared memory remains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHELON_TEST_MARK", str(tmp_path))
    before = held()
    yield command.CommandLine(capfd, monkeypatch)
    command.assert_no_orphan()
    assert held() <= before


def held():
    return set(PLACE.glob("echelon-snapshots-*"))


def rows(run):
    return [
        [row[key] for key in command.EXACT] for row in command.read_lines(run.metrics_path) if row["kind"] == "train"
    ]


@pytest.mark.slow
def test_a_lost_process_resumes_from_a_snapshot(echelon, tmp_path):
    checkpoint = {"every": 400, "snapshot_every_steps": 10}
    command.write_recipe(tmp_path, train={"steps": STEPS, "log_every": 100}, checkpoint=checkpoint, parallel="fsdp")
    run, whole = RunFolder(tmp_path / "runs" / "tiny"), RunFolder(tmp_path / "runs" / "whole")
    job = command.start(*COMMAND)
    command.await_line(run.metrics_path, '"step": 60,', job, seconds=120)
    victim = command.process_of(run, 1)
    victim.kill()
    ending = command.finish(job, 180)
    assert ending.code == 0, ending
    [resumed] = [row["step"] for row in command.read_lines(run.events_path) if row["event"] == "resume"]
    assert 50 <= resumed < 400 and f"Resuming from step-{resumed:08d}, a snapshot in memory." in ending.out, ending
    assert f"restart 1 of 3: from step {resumed}" in ending.out
    saves = [row["step"] for row in command.read_lines(run.events_path) if row["event"] == "checkpoint"]
    assert saves == [400, 600], "snapshots are no checkpoints of the run"
    assert echelon(*COMMAND, "run.dir=runs/whole", "checkpoint.snapshot_every_steps=null").code == 0
    assert rows(run) == rows(whole) and len(rows(run)) == STEPS
    assert equal_tensors(tensors_of(run.path, STEPS), tensors_of(whole.path, STEPS))


@pytest.mark.slow
def test_the_ranks_release_the_memory_of_a_killed_parent(echelon, tmp_path):
    command.write_recipe(tmp_path, train={"steps": 100000}, checkpoint={"every": 100000, "snapshot_every_steps": 5})
    before, run = held(), RunFolder(tmp_path / "runs" / "tiny")
    job = command.start(*COMMAND)
    command.await_line(run.metrics_path, '"step": 20,', job, seconds=120)
    [folder] = held() - before
    assert list(folder.glob("step-*"))
    job.kill()
    command.finish(job)
    command.assert_no_orphan()


def test_snapshots_are_refused_under_other_launchers(echelon, tmp_path):
    command.write_recipe(tmp_path, checkpoint={"snapshot_every_steps": 5})
    ending = command.finish(command.start("train", "recipe.json", RANK="0", WORLD_SIZE="1"))
    assert ending.code == 2 and "checkpoint.snapshot_every_steps=5" in ending.err and "remove this key" in ending.err
