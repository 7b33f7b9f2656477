"""A command that is killed together with its processes leaves temporary folders; the next one removes them."""

import os
import time

import psutil
import pytest

from echelon.ground.sockets import find_free_port
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import assert_no_orphan, await_line, finish, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_what_killed_processes_leave_is_removed_by_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_TEST_MARK", str(tmp_path))
    (place := tmp_path / "temporary").mkdir()
    write_recipe(tmp_path, train={"steps": 200, "eval_every": None}, checkpoint={"every": 100})
    run = RunFolder(tmp_path / "runs" / "tiny")
    endpoint = f"127.0.0.1:{find_free_port('127.0.0.1')}"
    arguments = ("train", "recipe.json", "--nproc", "1", "--nodes", "1", "--rendezvous", endpoint)
    job = start(*arguments, cwd=tmp_path, TMPDIR=str(place))
    await_line(run.metrics_path, '"step": 8,', job, seconds=120)
    family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    for process in family:
        process.suspend()
    for process in family:
        process.kill()
    job.communicate()
    [left] = place.glob("echelon-host-*")
    for path in (left, *left.rglob("*")):
        os.utime(path, (time.time() - 100,) * 2)
    finish(start(*arguments, cwd=tmp_path, TMPDIR=str(place)), 180).succeeded()
    assert not left.exists()
    assert not list(place.glob("echelon-*"))
    assert_no_orphan()
