"""Complete runs with remote checkpoints: a lost machine, a server that is down, a stop with little time."""

import os
import re
import shutil
import signal
from pathlib import Path

import fsspec
import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import assert_no_orphan, await_line, finish, read_lines, start, write_recipe
from tests.object_server import BUCKET, ObjectServer
from tests.parity.training import equal_tensors, tensors_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.slow]

EXACT = ("kind", "step", "tokens", "loss", "grad_norm", "learning_rate", "batch_hash")
STEPS = 300
TRAIN = ("train", "recipe.json", "--nproc", "2")


@pytest.fixture(scope="module")
def server():
    server = ObjectServer()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in server.environment.items():
            patch.setenv(key, value)
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield server
    server.stop()


@pytest.fixture(autouse=True)
def up(server):
    server.start()


def rows(run):
    return [tuple(row.get(key) for key in EXACT) for row in read_lines(run.metrics_path)]


def events(run, name):
    if not run.events_path.exists():
        return []
    return [row["step"] for row in read_lines(run.events_path) if row["event"] == name]


def await_events(run, name, job, count):
    """Wait for `count` events of this name; a download restores earlier ones."""
    wait_until(lambda: len(events(run, name)) >= count, 120, job, say=lambda: f"{name}: {events(run, name)}")


def test_a_run_that_lost_its_machine_equals_an_uninterrupted_one(echelon, server, tmp_path):
    sections = {
        "train": {"steps": STEPS, "global_batch_size": 4, "eval_every": 50, "precision": "fp32"},
        "fault": {"notice_seconds": 15},
    }
    write_recipe(tmp_path, checkpoint={"every": 10}, **sections)
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert echelon(*TRAIN).code == 0
    straight, straight_rows = tensors_of(run.path, STEPS), rows(run)
    shutil.rmtree("runs")

    # The server is down for a while; then the machine is lost.
    url = f"s3://{BUCKET}/runs/tiny"
    write_recipe(tmp_path, checkpoint={"every": 10, "remote": url}, **sections)
    job = start(*TRAIN)
    await_events(run, "upload", job, 1)
    server.stop()
    await_events(run, "upload_failed", job, 1)
    server.start()
    await_events(run, "upload", job, len(events(run, "upload")) + 1)
    os.killpg(job.pid, signal.SIGKILL)
    killed = finish(job)
    assert_no_orphan()
    assert killed.out.count("could not be uploaded") == 1 and not events(run, "done")
    uploaded, reached = events(run, "upload")[-1], rows(run)[-1][1]
    assert uploaded <= reached < STEPS
    shutil.rmtree("runs")

    # Another machine resumes. It is asked to stop while the server is down.
    job = start(*TRAIN)
    await_events(run, "resume", job, 1)
    resumed, failed = events(run, "resume"), len(events(run, "upload_failed"))
    server.stop()
    await_events(run, "upload_failed", job, failed + 1)
    os.kill(job.pid, signal.SIGTERM)
    stopped = finish(job)
    # Not killed at the end of the notice time, which would give code 1.
    assert stopped.code == 3 and resumed[0] >= uploaded, stopped
    assert f"Downloading step-{resumed[0]:08d}" in stopped.out and f"Resuming from step-{resumed[0]:08d}" in stopped.out
    assert re.search(rf"step-\d+ is saved in {run.path.relative_to(tmp_path)}, but not yet in {url}", stopped.out)
    server.start()

    ending = echelon(*TRAIN).succeeded()
    assert "Downloading" not in ending.out  # the local checkpoint is newer
    assert equal_tensors(tensors_of(run.path, STEPS), straight) and rows(run) == straight_rows
    ending = echelon("checkpoint", "verify", run.path)
    lines = [line.split() for line in ending.out.splitlines()]
    assert ending.code == 0 and all(line[2] == "whole" for line in lines), ending
    assert [line[1] for line in lines if len(line) == 3] == ["280", "290", "300"]
    remote = [line[1] for line in lines if len(line) == 4]  # a checkpoint that was still queued may be skipped
    assert len(remote) == 3 and remote[-1] == "300"
    secret = server.environment["AWS_SECRET_ACCESS_KEY"]
    written = [path for path in Path("runs").rglob("*") if path.is_file()]
    assert not any(secret in path.read_text(errors="replace") for path in written)
    assert secret not in killed.out + killed.err + stopped.out + stopped.err


def test_a_stop_waits_for_its_upload(echelon, server, tmp_path):
    url = f"s3://{BUCKET}/runs/other"
    write_recipe(tmp_path, checkpoint={"every": 100000, "remote": url}, train={"steps": 100000, "global_batch_size": 4})
    run = RunFolder(tmp_path / "runs" / "tiny")
    job = start(*TRAIN)
    await_line(run.metrics_path, '"step": 5,', job, seconds=120)
    os.kill(job.pid, signal.SIGTERM)
    stopped = finish(job)
    assert stopped.code == 3 and "not yet" not in stopped.out, stopped
    assert events(run, "upload") == events(run, "checkpoint") != []
    listed = echelon("checkpoint", "list", run.path).out
    assert len(re.findall(rf"step {events(run, 'upload')[0]}  ", listed)) == 2 and url in listed
