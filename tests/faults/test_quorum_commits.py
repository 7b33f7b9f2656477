"""Replicas are lost in the last sum of a step: some of the others have it and others not, and all go on from one state.

An objective plants what a death at this moment does: a sum that fails in some processes and ends well in others.
"""

import pytest

from tests.dist.command import RECIPE
from tests.faults.test_quorum import Job, assert_never_restarted, assert_same_rows, train_alone

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("marked")]

STEPS = 30
PARTS = '''
"""An objective whose processes end differently in the last sum of the ninth step: by the name of the process."""

import os
import signal
from pathlib import Path

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.journal import Journal
from echelon.run.lifecycle.view_group import ViewMembership

AT = 9
agree, write = ViewMembership.agree, Journal.train
FATES = {}
calls = 0


def agree_at(self, values):
    global calls
    calls += 1
    fate = FATES.get(self.member) if calls == AT else None
    if fate == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "writes its row and dies":
        Journal.train = write_and_die
    if fate == "fails":
        error = RuntimeError("Connection closed by peer")
        for group in self._groups:
            group.close()
        if self.inside.size == 1:
            raise error
        self._step._failure, values = error, values * 0
    return agree(self, values)


def write_and_die(self, row, further=()):
    write(self, row, further)
    Path("written").write_text(str(RunFolder(Path("runs/tiny")).rows.last_step()))
    os.kill(os.getpid(), signal.SIGKILL)


class Plant(CausalLM):
    def __init__(self, config, **fates):
        FATES.update({name.replace("_", ".")[1:]: fate for name, fate in fates.items()})
        ViewMembership.agree = agree_at
'''


def train(folder, fates, **sections):
    """Train with this fate of some processes; returns the job after its end."""
    (folder / "planted_parts.py").write_text(PARTS)
    options = {f"m{name.replace('.', '_')}": fate for name, fate in fates.items()}
    objective = {"name": "planted_parts:Plant", "options": options}
    job = Job(folder, STEPS, objective=objective, **sections).begin(PYTHONPATH=str(folder))
    job.end()
    return job


def compare_alone(folder, job):
    assert_same_rows(job.run, train_alone(folder, "objective={name: causal_lm}"))


def test_a_replica_that_lacks_the_step_gets_it_from_one_that_has_it(tmp_path):
    job = train(tmp_path, {"1.0.0": "fails", "2.0.0": "dies"})
    assert_never_restarted(job, 1)
    assert job.events("replica_lost")[0]["step"] == 9
    compare_alone(tmp_path, job)


def test_a_row_of_a_step_that_only_its_lost_writer_had_is_replaced(tmp_path):
    job = train(tmp_path, {"0.0.0": "writes its row and dies", "1.0.0": "fails", "2.0.0": "fails"})
    assert (tmp_path / "written").read_text() == "9"
    assert_never_restarted(job, 1)
    assert job.events("replica_lost")[0]["step"] == 8
    compare_alone(tmp_path, job)


def test_a_process_whose_sum_has_failed_gets_it_from_its_replica(tmp_path):
    fates = {"0.0.1": "fails", "1.0.0": "dies"}
    job = train(tmp_path, fates, replicas=2, size=2, parallel="fsdp", model=RECIPE["model"]["config"])
    assert_never_restarted(job, 1)
    assert job.events("replica_lost")[0]["step"] == 9
    compare_alone(tmp_path, job)
