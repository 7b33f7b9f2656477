"""The keeper's orders to the agents of two machines, and what they report: threads of this process, which meet in
a real store, with real children. The test says for the children that they train."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from echelon.ground.hosts import parse_group
from echelon.ground.sockets import find_free_port
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise import meeting
from echelon.run.supervise.board import MembershipStore
from echelon.run.supervise.coordinator import MachineReport
from echelon.run.supervise.decision import Restarts
from echelon.run.supervise.meeting import Meeting
from echelon.run.supervise.outcome import FAILED, read_outcomes
from echelon.run.supervise.replica_keeper import KeptRanks, ReplicaKeeper
from echelon.run.supervise.workers import Workers
from tests.waiting import wait_until

SLEEPING = "import time; time.sleep(600)"
FAILING = """
import os, sys, time
from pathlib import Path
from echelon.run.supervise.outcome import report, write_outcome
assert os.environ["LOCAL_RANK"] == "0" and os.environ["WORLD_SIZE"] == "2", os.environ
if os.environ["RANK"] == "1":
    write_outcome(Path(sys.argv[1]) / "b", report(1, 1, "the loss is not finite", final=True))
    sys.exit(1)
time.sleep(600)
"""


class Machine:
    def __init__(self, folder, group, name, argv, count, **options):
        self.folder = RunFolder(folder, folder / name)
        self.folder.create()
        self.job = Workers((sys.executable, "-c", argv, str(folder)), count, self.folder, num_machines=2, **options)
        self.meeting = Meeting(replace(group, coordinates=name == "a"), name, Restarts(0))
        self.ranks = KeptRanks(self.job, None, self.meeting)
        self.meeting.present(MachineReport(name=name, num_processes=count))

    @property
    def now(self):
        return self.meeting.now()


class Job:
    """Machines a, which coordinates, and b, with `count` ranks each."""

    def __init__(self, folder, nodes="2", argv=SLEEPING, count=1, **options):
        group = replace(parse_group(nodes, f"127.0.0.1:{find_free_port('127.0.0.1')}"), lives_on=True)
        self.make = lambda name: Machine(folder, group, name, argv, count, min_replicas=1, **options)
        with ThreadPoolExecutor(2) as threads:  # who comes first waits for the other one
            self.machines = list(threads.map(self.make, "ab"))
        wait_until(lambda: all(machine.now.team for machine in self.machines))
        self.keeper = ReplicaKeeper(self.machines[0].job, self.machines[0].meeting, "127.0.0.1")
        wait_until(lambda: all(machine.now.call for machine in self.machines))
        address, port = json.loads(self.machines[1].now.call)
        self.board = MembershipStore(TCPStore(address, port, timeout=timedelta(seconds=60), wait_for_workers=False))

    def until(self, holds):
        """Let the machines do what is due until something holds."""

        def look():
            for machine in self.machines:
                machine.ranks.follow(machine.now)
            self.keeper.look()
            return holds()

        wait_until(look)

    def train(self, *members):
        """Say that these processes train, and wait until they are the newest view; returns its number."""
        for member in members:
            self.board.tell_ready(member)
            self.board.mark("trains", member)
        self.until(lambda: self.view is not None and set(self.view.members) >= set(members))
        return self.view.number

    @property
    def view(self):
        number = 0
        while self.board.is_published(number):
            number += 1
        return self.board.read(number - 1) if number else None

    def children(self):
        """The processes that run, by their names."""
        own, names = str(self.machines[0].folder.path), {}
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended
                if own in child.cmdline():
                    names[child.environ()["ECHELON_REPLICA"]] = child
        return names


@pytest.fixture
def begin(tmp_path):
    jobs = []

    def make(**options):
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        for machine in job.machines[::-1]:
            machine.ranks.kill()
            machine.meeting.close()


def test_a_lost_process_is_started_again_on_its_machine(begin):
    job = begin()
    job.until(lambda: len(job.children()) == 2)
    assert job.train("0.0.0", "1.0.0") == 0
    lost = job.children()["1.0.0"]
    lost.kill()
    job.until(lambda: job.view.number == 1)
    assert job.view.members == ("0.0.0",) and job.board.is_over(0)
    [change] = job.view.changes
    assert (change.replica, change.pid, change.reason) == (1, lost.pid, "was killed by SIGKILL on b")
    job.until(lambda: set(job.children()) == {"0.0.0", "1.1.0"})
    assert job.train("1.1.0") == 2 and job.view.members == ("0.0.0", "1.1.0")


def test_a_loss_ends_also_the_view_that_the_others_have_not_left_yet(begin):
    """They are to leave it after their step, in which they wait for the lost process."""
    job = begin(count=2)
    job.until(lambda: len(job.children()) == 4)
    job.train("0.0.0", "1.0.0", "2.0.0", "3.0.0")
    job.children()["3.0.0"].kill()
    job.until(lambda: job.view.number == 1 and "3.1.0" in job.children())
    assert job.train("3.1.0") == 2 and not job.board.is_over(1)
    children = job.children()
    for member in ("2.0.0", "1.0.0"):
        children[member].kill()
    job.until(lambda: job.view.members == ("0.0.0", "3.1.0"))
    assert job.board.is_over(1) and job.board.is_over(2)
    changes = [change for number in range(3, job.view.number + 1) for change in job.board.read(number).changes]
    assert {change.replica for change in changes if change.reason is not None} == {1, 2}


def test_the_error_of_a_process_ends_the_job_and_is_told_to_the_first_machine(begin):
    job = begin(argv=FAILING)
    job.until(lambda: job.keeper.deaths)
    [death] = job.keeper.deaths
    assert (death.rank, death.exit_code) == (1, 1)
    [outcome] = read_outcomes(job.machines[0].folder.outcomes_dir)
    assert (outcome.rank, outcome.code, outcome.message, outcome.final) == (1, FAILED, "the loss is not finite", True)
    job.keeper.close()
    wait_until(lambda: job.machines[1].now.is_over)
    job.machines[0].ranks.end()
    job.keeper.await_exits()
    assert not job.children()


def test_a_process_that_ends_without_a_word_is_lost(begin):
    """Although it ends with exit code 0, as by `os._exit(0)`."""
    job = begin(argv="")
    job.until(lambda: job.keeper.deaths)
    assert {death.exit_code for death in job.keeper.deaths} == {0}


def test_nobody_goes_on_before_the_rest_of_a_lost_replica_has_ended(begin):
    """It may still write."""
    job = begin(count=2, replica_size=2)
    job.until(lambda: len(job.children()) == 4)
    job.train("0.0.0", "0.0.1", "1.0.0", "1.0.1")
    job.children()["1.0.1"].kill()
    other = job.machines[1]
    wait_until(lambda: other.ranks.follow(other.now) or other.now.exits)
    wait_until(lambda: job.keeper.look() or "1.0.0" not in (other.now.members[2] or ()))  # already replaced, or not yet
    for _ in range(5):
        job.keeper.look()
    assert job.view.number == 0 and "1.0.0" in job.children()
    job.until(lambda: job.view.number == 1)
    assert job.view.members == ("0.0.0", "0.0.1") and "1.0.0" not in job.children()


def test_a_lost_machine_gives_its_place_to_a_spare(begin, monkeypatch, caplog):
    caplog.set_level("INFO", "echelon")
    monkeypatch.setattr(meeting, "LOST_SECONDS", 2.0)
    job = begin(nodes="2+1")
    job.until(lambda: len(job.children()) == 2)
    job.train("0.0.0", "1.0.0")
    spare, lost = job.make("c"), job.machines.pop()
    wait_until(lambda: spare.meeting.host in spare.now.spares)
    lost.meeting.close()  # it sends no heartbeats any more
    job.until(lambda: job.view.number == 1)
    assert job.view.changes[0].reason == "was lost with its machine b"
    job.machines.append(spare)
    job.until(lambda: "1.1.0" in job.children())
    assert any("takes the place of b" in message for message in caplog.messages)
    wait_until(lambda: lost.meeting.host in lost.now.lost)  # it still reads the news
    assert "1.0.0" in job.children()
    lost.ranks.kill()
    assert "1.0.0" not in job.children() and job.keeper.deaths == []
