"""The keeper's orders to another machine, and what that reports: both ends in this process, with real children."""

import json
import platform
import signal
import socket
import sys
import threading
import time

import pytest

from echelon.ground.errors import LaunchError
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.hands import Machines, NodeAgent
from echelon.run.supervise.outcome import FAILED, MACHINE_LOST, ProcessDeath, describe_ending, read_outcomes
from echelon.run.supervise.workers import Workers

REPORTING = """
import os, sys, time
from pathlib import Path
from echelon.run.supervise.outcome import report, write_outcome
assert os.environ["LOCAL_RANK"] == "1" and os.environ["WORLD_SIZE"] == "4", os.environ
write_outcome(Path(sys.argv[1]), report(int(os.environ["RANK"]), 1, "the loss is not finite", final=True))
sys.exit(1)
"""


class Pair:
    """A keeper with one other machine, whose hand runs in a thread."""

    def __init__(self, folder, argv):
        self.near, self.far = RunFolder(folder, folder / "near"), RunFolder(folder, folder / "far")
        for each in (self.near, self.far):
            each.create()
        self.machines = Machines("127.0.0.1", 1, self.near.outcomes_dir)
        self.job = Workers(tuple(argv), 2, self.far, num_machines=2)
        self.ended = []
        self.thread = None

    def connect(self):
        hand = NodeAgent(self.job, None, self.machines.call)
        self.thread = threading.Thread(target=lambda: self.ended.append(hand.run()), daemon=True)
        self.thread.start()
        until(lambda: self.machines.admit() or self.machines.is_there(1))
        return self

    def start(self, member="1.0.1", rank=3):
        worker = self.machines.at(1).start(member, rank, 1234)
        until(lambda: worker.poll() is not None or worker.pid)
        return worker


def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeping(tmp_path):
    pair = Pair(tmp_path, [sys.executable, "-c", "import time; time.sleep(600)"]).connect()
    yield pair
    pair.machines.close()
    pair.thread.join(60)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_is_started_and_killed_there(sleeping):
    worker = sleeping.start()
    assert worker.poll() is None and is_alive(worker.pid)
    worker.kill()
    assert worker.wait() == -signal.SIGKILL and not is_alive(worker.pid)


def test_what_a_process_reports_is_read_by_the_keeper(tmp_path):
    pair = Pair(tmp_path, [sys.executable, "-c", REPORTING, str(tmp_path / "far")]).connect()
    worker = pair.start()
    assert worker.wait(60) == 1
    [outcome] = read_outcomes(pair.near.outcomes_dir)
    assert (outcome.rank, outcome.code, outcome.message, outcome.final) == (3, FAILED, "the loss is not finite", True)
    pair.machines.tell(do="end")
    pair.thread.join(60)
    assert pair.ended == [True]


def test_a_machine_that_loses_the_keeper_ends_its_processes(sleeping):
    worker = sleeping.start()
    sleeping.machines.close()
    sleeping.thread.join(60)
    assert sleeping.ended == [False] and not is_alive(worker.pid)


def test_a_machine_that_is_lost_gives_its_place_to_the_next(sleeping):
    first = sleeping.start()
    sleeping.machines.at(1).line.close()
    assert first.poll() == MACHINE_LOST and not sleeping.machines.is_there(1)
    assert describe_ending(ProcessDeath(3, first.pid, MACHINE_LOST, 0.0)) == "was lost with its machine"
    told = [first.describe_ending(ProcessDeath(3, first.pid, code, 0.0)) for code in (MACHINE_LOST, -9)]
    assert told == [f"was lost with its machine {platform.node()}", f"was killed by SIGKILL on {platform.node()}"]
    sleeping.thread.join(60)
    sleeping.connect()
    second = sleeping.start("1.1.1")
    assert second.poll() is None and not is_alive(first.pid) and is_alive(second.pid)


def test_a_stranger_gets_no_orders(tmp_path):
    """A program that does not know the word, and one that sends no message."""
    pair = Pair(tmp_path, ["true"])
    address, port, _ = json.loads(pair.machines.call)
    for said in (b'{"token": "guessed", "name": "x"}\n', b"GET / HTTP/1.1\r\n\r\n", b"[1]\n"):
        with socket.create_connection((address, port)) as line:
            line.sendall(said)
            pair.machines.admit()
            line.settimeout(60)
            assert line.recv(1) == b""
            assert not pair.machines.is_there(1)
    pair.machines.close()
    with pytest.raises(LaunchError, match="the machine that keeps the replicas cannot be reached"):
        NodeAgent(pair.job, None, json.dumps([address, port, ""]))
