"""A parameter server is killed: the job restarts from a checkpoint, and ends as one that lost nothing."""

import pytest

from tests.dist.command import read_lines
from tests.faults.test_quorum import Job, assert_same_rows, fed, train_alone

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("marked")]

RANKS = 3


def train_with_a_kill(folder, lost=0, servers=1, **sync):
    """A run of three workers, of which one that is a server is killed after the first checkpoint."""
    job = Job(folder, 60, RANKS, sync={"name": "parameter_server", "servers": servers, **sync}).begin()
    job.until(lambda: job.events("checkpoint"))
    job.strike(lost)
    job.end()
    [restart], [_] = job.events("restart"), job.events("resume")
    assert 0 < restart["detection_seconds"] < 15, "from the death until all processes had ended"
    return job


@pytest.mark.parametrize(("lost", "servers"), [(0, 1), (1, 2)])
def test_rows_are_those_of_a_single_process_if_steps_wait(tmp_path, lost, servers):
    job = train_with_a_kill(tmp_path, lost, servers)
    assert_same_rows(job.run, train_alone(tmp_path))


def test_every_step_is_fed_whole_if_workers_do_not_wait(tmp_path):
    """Losses depend on the order of pushes; what each step reads does not."""
    job = train_with_a_kill(tmp_path, max_staleness=2)
    rows = read_lines(job.run.metrics_path)
    assert fed(rows) == fed(train_alone(tmp_path))
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
