"""A quorum whose sums go over NCCL, here a fake over gloo: a lost replica is noticed only by a thread, which aborts.

An objective plants the fake, as if each process had a GPU, and kills one of them as it begins a sum.
"""

import itertools
import os
from pathlib import Path

import pytest

from tests.dist.command import RECIPE
from tests.faults.test_quorum import JOINED, LOST, Job, assert_never_restarted, assert_same_rows, train_alone

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("marked")]

ROOT = Path(__file__).parents[2]
VIEW, SYNCHRONIZED, VOTE, ABORT = "view", "device is synchronized", "vote", "abort"
PARTS = '''
"""An objective that makes a process of a quorum send as one with a GPU does."""

import os
import signal

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.run.lifecycle.view_group import ViewMembership
from tests import fake_nccl

AT = 20
form_groups, agree, begin = ViewMembership.form_groups, ViewMembership.agree, fake_nccl.FakeWork.__init__
calls = 0


def form_planted(self):
    self.transport = fake_nccl.PLANTED
    fake_nccl.note("view")
    if self.member == VICTIM:
        fake_nccl.FakeWork.__init__ = die_at
    return form_groups(self)


def agree_noted(self, values):
    agreed = agree(self, values)
    fake_nccl.note("vote")
    return agreed


def die_at(self, operate, backend):
    global calls
    calls += 1
    if calls == AT:
        os.kill(os.getpid(), signal.SIGKILL)
    begin(self, operate, backend)


class Plant(CausalLM):
    def __init__(self, config, victim):
        global VICTIM
        VICTIM = victim
        fake_nccl.plant()
        ViewMembership.form_groups, ViewMembership.agree = form_planted, agree_noted
'''


@pytest.mark.parametrize(
    ("victim", "sections"),
    [
        pytest.param("1.0.0", {}, id="ddp"),
        pytest.param("1.0.1", {"size": 2, "parallel": "fsdp", "model": RECIPE["model"]["config"]}, id="fsdp"),
    ],
)
def test_a_loss_that_nccl_does_not_notice_changes_nothing(tmp_path, victim, sections):
    """The lost replica returns, so groups are also left without a loss."""
    (tmp_path / "planted_parts.py").write_text(PARTS)
    objective = {"name": "planted_parts:Plant", "options": {"victim": victim}}
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    job = Job(tmp_path, 300, replicas=2, objective=objective, **sections)
    job.begin(PYTHONPATH=path, FAKE_NCCL_LOG=str(tmp_path / "calls"))
    job.end()
    assert_never_restarted(job, 1)
    assert [event["replica"] for event in job.events(LOST, JOINED)] == [1, 1]
    assert_same_rows(job.run, train_alone(tmp_path, "objective={name: causal_lm}"))
    logs = [path.read_text().splitlines() for path in tmp_path.glob("calls-*")]
    assert len(logs) == 3 * job.size
    for lines in logs:
        events = [line.rsplit(" ", 1)[0] for line in lines]
        followed = {before for before, event in itertools.pairwise(events) if event == VOTE}
        # The first view of the other replica alone has no sums between replicas.
        assert followed <= {VIEW, SYNCHRONIZED, VOTE}, "no vote succeeds after an abort"
    ends = ["wait of an aborted operation has ended True" in lines for lines in logs]
    assert any(f"{ABORT} False" in lines for lines in logs), "a thread has aborted a sum with the lost process"
    assert all(f"{ABORT} False" in lines for lines, has_ended in zip(logs, ends, strict=True) if has_ended)
