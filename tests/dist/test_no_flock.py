"""A file system without locks: a run still excludes a second one, and a killed run does not block the next."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from echelon.ground.file_lock import FileLock
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import finish, read_lines, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

SHIM = "#include <errno.h>\nint flock(int fd, int operation) { errno = %s; return -1; }\n"
HOLD = (
    "import sys, time; from pathlib import Path; from echelon.ground.file_lock import FileLock; "
    "lock = FileLock(Path(sys.argv[1])); print(lock.take(), lock.read_holder(), flush=True); "
    "time.sleep(float(sys.argv[2]))"
)


@pytest.fixture(params=["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def lockless(request, tmp_path):
    """The variables for a process whose file system answers `flock` with this error."""
    (tmp_path / "shim.c").write_text(SHIM % request.param)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c"], check=True)
    return {"LD_PRELOAD": str(tmp_path / "shim.so")}


def hold(path, lockless, seconds):
    """A process that takes a lock; with what it prints."""
    command = [sys.executable, "-c", HOLD, str(path), str(seconds)]
    process = subprocess.Popen(command, env=os.environ | lockless, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_one_process_holds_a_lock_until_it_ends(tmp_path, lockless):
    path = tmp_path / "lock"
    first, said = hold(path, lockless, 60)
    assert said == f"True {first.pid} on {os.uname().nodename}"
    second, said = hold(path, lockless, 0)
    assert said == f"False {first.pid} on {os.uname().nodename}" and FileLock(path).mark.exists()
    first.kill()
    first.wait()
    third, said = hold(path, lockless, 0)
    assert said.startswith(f"True {third.pid} on ")
    for each in (second, third):
        each.wait()
    FileLock(path).mark.write_text("17 on another-machine\n")
    fourth, said = hold(path, lockless, 0)
    assert said == "False 17 on another-machine", "whether it runs cannot be known here"
    fourth.wait()


@pytest.mark.slow
@pytest.mark.parametrize("lockless", ["ENOLCK"], indirect=True)
def test_a_run_on_a_file_system_without_locks(tmp_path, lockless):
    write_recipe(tmp_path, train={"steps": 2000, "eval_every": None}, checkpoint={"every": 20})
    run = RunFolder(tmp_path / "runs" / "tiny")
    arguments = ("train", "recipe.json", "--nproc", "1")
    first = start(*arguments, cwd=tmp_path, **lockless)
    while run.newest_step() is None:
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    status = finish(start("status", "runs/tiny", cwd=tmp_path, **lockless))
    assert status.code == 0 and f"running  process {first.pid} on" in status.out, status
    second = finish(start(*arguments, cwd=tmp_path, **lockless), 60)
    assert second.code == 2 and second.err.count("\n") == 1
    assert f"run.dir=runs/tiny is in use by a live run (pid {first.pid} on " in second.err
    assert (
        "This file system has no locks (flock), so if that process has ended, remove runs/tiny/.lock-held" in second.err
    )
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    again = start(*arguments, cwd=tmp_path, **lockless)
    while not any(event["event"] == "resume" for event in read_lines(run.events_path)):
        assert again.poll() is None, again.communicate()
        time.sleep(0.05)
    again.terminate()
    assert finish(again, 60).code == 3
    assert not (run.path / ".lock-held").exists()
