"""Workers forked from a warm process: as good as started ones, and no interpreter starts twice."""

import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from echelon.ground.quiet_imports import garbage_kept
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.workers import WarmStart
from tests.dist.command import MARK, assert_no_orphan, await_line, finish, process_of, read_lines, start, write_recipe
from tests.waiting import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")]

STUB = Path(__file__).with_name("warm_stub.py")
ENVIRONMENT = {"PATH": "/bin", "RANK": "1", "OMP_NUM_THREADS": "3,2", "ODD": 'a "quoted"\nline \udce9'}


@pytest.fixture
def warm(marked, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STUB.parent))
    with closing(WarmStart((sys.executable, str(STUB)), {})) as warm:
        yield warm


def fork(warm, place, order):
    return warm.fork(("python", "-m", "warm_stub", str(place), order), ENVIRONMENT)


def await_file(path):
    wait_until(path.exists, say=lambda: path)
    return json.loads(path.read_text())


def test_a_forked_worker_is_like_a_started_one(warm, tmp_path):
    worker, other = (fork(warm, tmp_path / name, order) for name, order in (("one", "sleep"), ("two", "7")))
    facts = await_file(tmp_path / "one")
    assert facts["environment"] == ENVIRONMENT and facts["threads"] == 3
    assert facts["parent"] == os.getpid() and facts["session"] == worker.pid
    assert not [each for each in facts["files"] if "socket" in each or "pipe" in each], "a channel was left open"
    assert other.wait(60) == 7 and other.poll() == 7
    assert worker.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.05)
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait(60) == -signal.SIGKILL


def test_a_warm_process_that_is_gone_forks_nothing(warm, tmp_path):
    worker = fork(warm, tmp_path / "one", "sleep")
    [process] = [each for each in psutil.Process().children() if str(STUB) in each.cmdline() and each.pid != worker.pid]
    process.kill()
    process.wait()
    assert fork(warm, tmp_path / "two", "0") is None
    assert worker.poll() is None, "workers outlive the process that forked them"
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait(60) == -signal.SIGKILL


def test_the_garbage_collector_pauses_during_imports():
    with garbage_kept():
        assert not gc.isenabled()
        with garbage_kept():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.slow
def test_a_restart_starts_no_interpreter(monkeypatch, tmp_path):
    """The command and the warm process are all: ranks, and their successors after a failure, inherit their imports.

    The command itself imports neither models nor the training.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, json, os, sys\n"
        f"path = {str(tmp_path / 'imported-')!r} + str(os.getpid())\n"
        "imported = lambda: open(path, 'w').write(' '.join(sys.modules))\n"
        "atexit.register(imported)\n"
        f"with open({str(tmp_path / 'interpreters')!r}, 'a') as file:\n"
        "    file.write(json.dumps({'pid': os.getpid(), 'argv': sys.orig_argv}) + '\\n')\n"
    )
    write_recipe(tmp_path, train={"steps": 100_000}, checkpoint={"every": 5})
    run = RunFolder(tmp_path / "runs" / "tiny")
    job = start("train", "recipe.json", "--nproc", "2", PYTHONPATH=str(tmp_path))
    await_line(run.events_path, '"event": "checkpoint"', job, 300)
    ranks = [process_of(run, rank).pid for rank in (0, 1)]
    [begun] = [row for row in read_lines(run.events_path) if row["event"] == "start"]
    assert begun["pids"] == {"0": ranks[0], "1": ranks[1]} and begun["host"]
    os.kill(ranks[1], signal.SIGKILL)
    await_line(run.events_path, '"event": "resume"', job, 300)
    successors = [process_of(run, rank).pid for rank in (0, 1)]
    job.send_signal(signal.SIGTERM)
    ending = finish(job, 120)
    assert ending.code == 3, ending
    assert_no_orphan()
    started = {row["pid"]: " ".join(row["argv"]) for row in read_lines(tmp_path / "interpreters")}
    trained = [pid for pid, words in started.items() if "echelon" in words]
    assert trained[0] == job.pid and len(trained) == 2, started
    imported = (tmp_path / f"imported-{job.pid}").read_text().split()
    assert "echelon.run.lifecycle.session" in imported
    assert not {"transformers.modeling_utils", "echelon.learn.engines.engine", "torch._dynamo"} & set(imported)
    assert not {*ranks, *successors} & started.keys() and not set(ranks) & set(successors)
