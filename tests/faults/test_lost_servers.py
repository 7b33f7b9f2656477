"""A worker or a parameter server is killed: the job restarts from its checkpoint and ends as one that lost nothing."""

import pytest

from command import MARK, assert_no_orphan, read_lines
from test_quorum import Job, assert_same_rows, train_alone

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RANKS = 3


@pytest.fixture(autouse=True)
def marked(tmp_path, monkeypatch):
    """No process that a test starts may outlive it."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    assert_no_orphan()


def train_with_a_kill(folder, lost, **sync):
    """A run of a server and two further workers, of which one process is killed after the first checkpoint."""
    job = Job(folder, 60, RANKS, sync={"name": "parameter_server", **sync}).begin()
    job.until(lambda: job.events("checkpoint"))
    job.strike(lost)
    job.end()
    assert len(job.events("restart")) == len(job.events("resume")) == 1
    return job


@pytest.mark.parametrize("lost", [0, 2], ids=["server", "worker"])
def test_rows_are_those_of_a_single_process_if_steps_wait(tmp_path, lost):
    job = train_with_a_kill(tmp_path, lost)
    assert_same_rows(job.run, train_alone(tmp_path))


@pytest.mark.parametrize("lost", [0, 2], ids=["server", "worker"])
def test_every_step_is_fed_whole_if_workers_do_not_wait(tmp_path, lost):
    """Losses depend on the order of pushes; what each step reads does not."""
    job = train_with_a_kill(tmp_path, lost, max_staleness=2)
    rows, alone = (
        [row for row in each if row["kind"] == "train"]
        for each in (read_lines(job.run.metrics_path), train_alone(tmp_path))
    )
    assert [(row["step"], row["batch_hash"], row["tokens"]) for row in rows] == [
        (row["step"], row["batch_hash"], row["tokens"]) for row in alone
    ]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
