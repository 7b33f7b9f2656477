"""Jobs of real processes: each ending gives one exit code and one message, and no process is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from echelon.ground.sockets import find_free_port
from tests.dist.command import LAUNCHER_KEYS, read_lines
from tests.waiting import wait_until

pytestmark = pytest.mark.dist

STUB = Path(__file__).with_name("stub_job.py")


def start_job(folder, mode, count=2, restarts=0, *rendezvous):
    command = [sys.executable, str(STUB), "parent", str(folder), str(count), mode, str(restarts), *rendezvous]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_job(folder, mode, count=2, restarts=0, *rendezvous):
    """Run a job; return its exit code, the console lines, and the message of the parent."""
    job = start_job(folder, mode, count, restarts, *rendezvous)
    output, _ = job.communicate(timeout=300)
    lines = output.splitlines()
    [message] = [line.removeprefix("message: ") for line in lines if line.startswith("message: ")]
    return job.returncode, lines, message


def await_workers(folder, count=2):
    """Wait until all workers run; return their pids."""
    files = [folder / f"pid-{rank}" for rank in range(count)]
    wait_until(
        lambda: all(file.exists() and file.read_text() for file in files),
        120,
        say=lambda: "the workers did not start",
    )
    return [int(file.read_text()) for file in files]


def assert_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.05)


def test_success_prints_nothing_else(tmp_path):
    code, lines, message = run_job(tmp_path, "succeed")
    assert (code, message) == (0, "")
    # Only rank 0 writes to the terminal; the agent prints nothing.
    assert lines == ["rank 0 of 2 is up", "message: "]
    [line] = (tmp_path / "logs" / "rank-00001.log").read_text().splitlines()
    assert line.endswith(" INFO rank 1 echelon: rank 1 of 2 is up")


def test_refusal_is_code_2_and_one_message(tmp_path):
    code, lines, message = run_job(tmp_path, "refuse")
    assert (code, message) == (2, "train.steps=0 is no length; give 1 or more.")
    assert len(lines) == 2


@pytest.mark.slow
def test_exception_names_its_rank_and_the_traceback_stays_in_the_log(tmp_path):
    code, lines, message = run_job(tmp_path, "raise")
    assert code == 1
    log = tmp_path / "logs" / "rank-00001.log"
    assert message == f"rank 1 failed: ValueError: the seventh tensor is missing; see {log}"
    assert len(lines) == 2
    assert "Traceback" in log.read_text()


def test_killed_rank_is_named(tmp_path):
    code, _, message = run_job(tmp_path, "kill")
    pid = (tmp_path / "pid-1").read_text()
    assert code == 1
    assert message.startswith(f"rank 1 (pid {pid}) was killed by SIGKILL")
    assert message.endswith(f"see {tmp_path / 'logs' / 'rank-00001.log'}")


@pytest.mark.parametrize("group", ["none", pytest.param("of one machine", marks=pytest.mark.slow)])
def test_killed_rank_is_restarted_without_waiting_for_a_hanging_peer(tmp_path, monkeypatch, group):
    """A single machine and a group of one behave the same; neither opens the rendezvous port, which is in use here."""
    monkeypatch.setenv("STUB_KILLED", str(tmp_path / "killed"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        rendezvous = [] if group == "none" else [f"127.0.0.1:{other.getsockname()[1]}"]
        code, lines, message = run_job(tmp_path, "kill once", 2, 1, *rendezvous)
    assert (code, message) == (0, ""), lines
    up, failure, restart, up_again, _ = lines
    assert up == up_again == "rank 0 of 2 is up"
    assert "was killed by SIGKILL" in failure and failure.startswith("failure: rank 1 (pid ")
    assert restart == "restart 1 of 1: from the beginning"
    events = read_lines(tmp_path / "events.jsonl")
    assert [row["event"] for row in events] == ["failure", "restart"]
    # The report of the death, one second of grace, the agent's polling.
    assert 1 < events[1]["detection_seconds"] < 15


@pytest.mark.slow
def test_refusals_and_recurring_failures_are_not_restarted(tmp_path):
    code, lines, _ = run_job(tmp_path / "a", "refuse", restarts=3)
    assert code == 2 and not [line for line in lines if line.startswith("restart")]
    code, lines, message = run_job(tmp_path / "b", "raise", count=2, restarts=3)
    assert code == 1 and [line for line in lines if line.startswith("restart")] == [
        "restart 1 of 3: from the beginning",
        "restart 2 of 3: from the beginning",
    ]
    assert "rank 1 failed: ValueError: the seventh tensor is missing" in message
    assert message.endswith("the same failure occurred again without a new checkpoint, 3 times in a row")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopping_the_parent_stops_the_workers(tmp_path, number):
    job = start_job(tmp_path, "work")
    pids = await_workers(tmp_path)
    job.send_signal(number)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 1
    assert output.splitlines()[-1] == f"message: stopped by {number.name}"
    assert_gone(pids, seconds=0.5)


def test_ranks_meet_in_a_store_of_their_agent(tmp_path):
    """In one of rank 0 it would need a connection with each other rank."""
    job = start_job(tmp_path, "work")
    port = int(psutil.Process(await_workers(tmp_path)[0]).environ()["MASTER_PORT"])
    listening = {line.pid for line in psutil.net_connections("tcp") if line.laddr.port == port and not line.raddr}
    job.terminate()
    job.communicate(timeout=300)
    assert listening == {job.pid}


@pytest.mark.slow
def test_a_job_under_nohup_survives_its_terminal(tmp_path):
    """SIGHUP is ignored under nohup; the next signal stops the job."""
    command = [sys.executable, str(STUB), "parent", str(tmp_path), "2", "work", "0"]
    job = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    pids = await_workers(tmp_path)
    for pid in (job.pid, *pids):
        os.kill(pid, signal.SIGHUP)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=300)
    assert output.splitlines()[-1] == "message: stopped by SIGTERM"


def test_killing_the_parent_leaves_no_orphan(tmp_path):
    job = start_job(tmp_path, "work")
    pids = await_workers(tmp_path)
    job.kill()
    job.communicate(timeout=60)
    assert_gone(pids, seconds=5)


def open_store(seconds, port):
    """The last line of rank 0 of two, which opens its store at a port and waits some seconds for its peer."""
    code = f"from echelon.run.lifecycle.process_group import open_store; open_store({seconds})"
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    env |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    return result.stderr.strip().splitlines()[-1].removeprefix("echelon.ground.errors.LaunchError: ")


def test_used_port_is_named_with_a_fix():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        said = open_store(10, port)
    assert said.startswith(f"rank 0 cannot listen on 127.0.0.1:{port}") and "MASTER_PORT" in said


def test_missing_peer_is_named_with_a_fix():
    port = find_free_port("127.0.0.1")
    assert open_store(2, port).startswith(f"rank 0 did not meet all 2 processes at 127.0.0.1:{port}")
