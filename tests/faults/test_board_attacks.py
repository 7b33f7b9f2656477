"""A client that is no replica writes to the board of a quorum: the job goes on, or restarts, and never waits forever.

Every user of the machine can connect to the board, which has no passwords.
"""

import os
import signal
import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from tests.dist.command import read_lines
from tests.faults.test_quorum import Job, assert_same_rows, fed, train_alone

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("marked")]

STEPS = 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of the same run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    Job(folder, STEPS, replicas=2)
    return train_alone(folder)


def connect(job):
    """A client of the keeper's board, as another user of the machine would be."""
    lines = psutil.Process(job.process.pid).net_connections("tcp")
    [port] = {line.laddr.port for line in lines if line.status == psutil.CONN_LISTEN}
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5))


def end_views(store):
    for number in range(5):
        store.set(f"over/{number}", "")


def set_counter(text):
    return lambda store: store.set("views", text)


def set_view(text, number=1):
    def attack(store):
        store.set(f"view/{number}", text)
        store.set("over/0", "")

    return attack


def forget_presence(store):
    """Remove what says that the replicas have trained and are ready."""
    for number in range(2):
        store.delete_key(f"ready/{number}.0.0")
        store.delete_key(f"trains/{number}.0.0")
    store.set("over/0", "")


def skip_entry(store):
    """Make the replicas skip the next view, in which none of them is missing."""
    store.set("entry/1", "changed")
    store.set("over/0", "")


WAITING = "the wait for the other replicas did not end within 6 s (fault.hang_seconds)"
# What is done to the board, and the failure after which the job restarts, if one follows.
ATTACKS = {
    "over": (end_views, None),
    "count": (set_counter("1000"), None),
    "count no number": (set_counter("x" * 50), None),
    "view no JSON": (set_view("]["), None),
    "view of others": (set_view('{"number": 1, "members": ["8.0.0", "9.0.0"], "changes": []}'), None),
    "presence": (forget_presence, None),
    "entry": (skip_entry, WAITING),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_a_client_of_the_board_cannot_block_the_job(tmp_path, request, name):
    attack, failure = ATTACKS[name]
    job = Job(tmp_path, STEPS, replicas=2, fault={"hang_seconds": 6}).begin()
    job.until(lambda: job.last_step() >= 10)
    attack(connect(job))
    job.end()
    failures = [event["message"] for event in job.events("failure")]
    assert len(failures) == (failure is not None) and all(failure in each for each in failures), failures
    assert [step for step, *_ in fed(read_lines(job.run.metrics_path))] == list(range(1, STEPS + 1))
    if name != "over":  # in `make test`
        assert_same_rows(job.run, request.getfixturevalue("rows"))


@pytest.mark.slow
def test_a_signal_ends_replicas_that_wait_for_each_other(tmp_path):
    job = Job(tmp_path, STEPS, replicas=2, fault={"hang_seconds": None, "notice_seconds": 5}).begin()
    job.until(lambda: job.last_step() >= 10)
    skip_entry(connect(job))
    time.sleep(1)  # until both have noticed
    for pid in job.run.read_pids().values():
        os.kill(pid, signal.SIGTERM)
    ending = job.end(code=1)
    assert "stopped by SIGTERM while this replica waited for the others" in ending.err
