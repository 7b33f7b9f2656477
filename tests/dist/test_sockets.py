"""Sockets and files of a job: nothing is exposed to the network, and a low limit of open files says what to raise."""

import resource
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, find_listeners, finish, start, write_recipe

pytestmark = pytest.mark.dist


def train(folder, soft, hard):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "4"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=limit, timeout=300)


def test_the_soft_limit_is_raised(tmp_path):
    write_recipe(tmp_path, train={"steps": 2})
    ending = train(tmp_path, 28, 1024)
    assert ending.returncode == 0, ending.stdout + ending.stderr


@pytest.mark.parametrize(
    ("limit", "policy"),
    [(28, "restart"), (20, "restart"), (20, "replace")],
    ids=["rank", "agent", "keeper"],
)
def test_too_low_a_hard_limit_is_named(tmp_path, limit, policy):
    write_recipe(tmp_path, train={"steps": 2}, fault={"on_lost_process": policy})
    ending = train(tmp_path, limit, limit)
    assert ending.returncode == 1
    assert f"too many open files: a process here may have {limit} (ulimit -n)" in ending.stderr, ending.stderr


def find_own_addresses():
    """Every IPv4 address of this machine except loopback."""
    own = [line.address for lines in psutil.net_if_addrs().values() for line in lines if line.family == socket.AF_INET]
    return [address for address in own if not address.startswith("127.")]


def is_open(address, port):
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((address, port)) == 0


@pytest.fixture
def job(marked, tmp_path):
    """A job of two processes that trains until it is stopped."""
    write_recipe(tmp_path, train={"steps": 100_000}, checkpoint={"every": 100_000})
    return start("train", "recipe.json", "--nproc", "2", cwd=tmp_path)


@pytest.mark.skipif(sys.platform == "darwin", reason="the sockets of other processes need root there")
def test_a_local_job_listens_only_on_loopback(job, tmp_path):
    await_line(RunFolder(tmp_path / "runs" / "tiny").metrics_path, '"step": 2,', job, 300)
    listeners = find_listeners()
    reached = [
        (address, port) for _, _, port in listeners for address in find_own_addresses() if is_open(address, port)
    ]
    job.send_signal(signal.SIGTERM)
    ending = finish(job, 60)
    assert {pid for pid, _, _ in listeners} >= {job.pid}, "which has the store of the ranks"
    assert {address for _, address, _ in listeners} == {"127.0.0.1"}, listeners
    assert not reached
    assert ending.code == 3, ending
