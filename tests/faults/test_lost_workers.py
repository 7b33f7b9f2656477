"""Workers of parameter servers are killed: the job goes on, takes new ones in, and feeds every batch whole.

`test_quorum.py` has the daily test, `test_ten_losses.py` ten kills. ECHELON_FAULTS_SEED sets the seed.
"""

import random
import re
from collections import Counter

import pytest

from command import MARK, assert_no_orphan, read_lines
from test_quorum import (
    JOINED,
    LOST,
    SEED,
    SERVER,
    Job,
    assert_never_restarted,
    assert_same_rows,
    describe,
    kill_at_random,
    train_alone,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

APPLIED = re.compile(r"server: share (\d+) of step (\d+) is applied")


@pytest.fixture(autouse=True)
def marked(tmp_path, monkeypatch):
    """No process that a test starts may outlive it."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    assert_no_orphan()


def read_applied(job, server):
    """What a server wrote down: how often it has applied each share, by step and share, both from 1 and from 0."""
    return Counter((int(step), int(share)) for share, step in APPLIED.findall(job.run.log_path(server).read_text()))


def fed(rows):
    """What each step read."""
    return [(row["step"], row["batch_hash"], row["tokens"]) for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("staleness", [2, None], ids=str)
@pytest.mark.parametrize(("replicas", "servers"), [(3, 1), (4, 2)])
def test_servers_apply_every_share_once_if_workers_do_not_wait(tmp_path, replicas, servers, staleness):
    """Losses depend on the order of pushes; what each step reads does not."""
    draw, steps = random.Random(f"{SEED} {replicas} {staleness}"), 120
    job = Job(tmp_path, steps, replicas, sync={**SERVER, "servers": servers, "max_staleness": staleness})
    job.begin(ECHELON_LOG_LEVEL="debug")
    kill_at_random(job, sorted(draw.sample(range(5, 60), 2)), draw, servers)
    job.until(lambda: job.events(JOINED))
    job.end()
    print(describe(job))
    assert_never_restarted(job, 2)
    shares = {(step, share): 1 for step in range(1, steps + 1) for share in range(replicas)}
    for server in range(servers):
        assert read_applied(job, server) == shares
    rows = read_lines(job.run.metrics_path)
    assert fed(rows) == fed(train_alone(tmp_path))
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5


def test_a_signal_stops_it_while_a_worker_is_lost_and_it_resumes(tmp_path):
    job = Job(tmp_path, 90, sync=SERVER).begin()
    job.until(lambda: job.last_step() >= 10)
    job.process.terminate()
    job.strike(2)
    ending = job.end(code=3)
    step = job.run.newest_step()
    assert step and f"stopped by SIGTERM at step {step}, saved in " in ending.err
    assert not {"restart", "failure"} & {event["event"] for event in job.events()}
    job.begin()
    job.until(lambda: job.last_step() >= step + 5)
    job.strike(1)
    job.end()
    assert len(job.events("resume")) == 1 and not job.events("restart")
    assert_same_rows(job.run, train_alone(tmp_path))


def test_bad_steps_are_skipped_by_all_workers(tmp_path):
    """Spikes are judged by the norms of earlier steps, which a worker that joins must get too."""
    bad = {"on_bad_step": "skip", "max_bad_steps": 50, "spike_factor": 1.02, "spike_window": 4}
    job = Job(tmp_path, 60, sync=SERVER, fault=bad).begin()
    job.until(lambda: job.last_step() >= 12)
    job.strike(1)
    job.until(lambda: job.events(JOINED))
    job.strike(2)
    job.end()
    assert_never_restarted(job, 2)
    assert [event["replica"] for event in job.events(LOST)] == [1, 2]
    alone = train_alone(tmp_path)
    assert any(row.get("skipped") for row in alone)
    assert_same_rows(job.run, alone)


def test_compressed_pushes_lose_what_was_not_sent(tmp_path):
    """The run goes on; each worker that is left drops the rest of its gradients, and the log says so."""
    job = Job(tmp_path, 60, sync={**SERVER, "compress": {"method": "topk", "fraction": 0.1}}).begin()
    job.until(lambda: job.last_step() >= 8)
    job.strike(1)
    job.end()
    assert_never_restarted(job, 1)
    assert "what workers had not sent of their gradients is dropped" in job.run.log_path(0).read_text()
    rows = read_lines(job.run.metrics_path)
    assert fed(rows) == fed(train_alone(tmp_path))
