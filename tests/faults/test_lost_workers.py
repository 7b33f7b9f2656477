"""Workers of parameter servers are killed: the job goes on, takes new ones in, and feeds every batch whole.

`test_quorum.py` has what holds for replicas of a quorum too, `test_thousand_losses.py` more kills. ECHELON_FAULTS_SEED
sets the seed.
"""

import random
import re
from collections import Counter

import pytest

from tests.dist.command import read_lines
from tests.faults.test_quorum import (
    JOINED,
    SEED,
    SERVER,
    Job,
    assert_never_restarted,
    describe,
    fed,
    kill_at_random,
    train_alone,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("marked")]

APPLIED = re.compile(r"server: share (\d+) of step (\d+) is applied")


def read_applied(job, server):
    """What a server wrote down: how often it has applied each share, by step and share, both from 1 and from 0."""
    return Counter((int(step), int(share)) for share, step in APPLIED.findall(job.run.log_path(server).read_text()))


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
