"""Processes and machines are lost at random moments under every plan, ten in each test; `make losses`: 1,000 in all.

Also in evaluations and saves, and during the recovery from the loss before. Afterwards a run has the rows and the last
weights of one that lost nothing. `make losses` writes what each loss cost to benchmarks/results/lost-processes-cpu.md.
ECHELON_LOSSES_COUNT sets the number of losses of all tests together, ECHELON_FAULTS_SEED the seed.
"""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import finish, read_lines, start, write_recipe
from tests.faults.losses import COUNT, JOINED, LOST, MACHINES, PROCESSES, RANDOM, REPLACED, Strike, Struck, keep
from tests.faults.test_quorum import PATIENCE_SECONDS, SEED, SERVER, Job, assert_same_rows
from tests.faults.test_replaced_processes import read_exact
from tests.launchers.test_quorum_hosts import Job as HostJob
from tests.launchers.test_quorum_hosts import workers
from tests.namespaces import machines, namespaces_allowed
from tests.parity.training import equal_tensors, tensors_of

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("marked")]

AT_ONCE = 10  # losses of a test, unless the environment has their number
TOLERANCE = 2e-5  # of a weight
DURING_RECOVERY, WHOLE_MACHINE = 0.2, 0.15  # how often
LORA = {"adapter": {"method": "lora", "r": 4}}
SHARDED_TP = {"dp_shard": 2, "tp": 2}
# So that a run does not end while a replica is awaited.
PACE = """
import time
from pathlib import Path
from echelon.run.training.callbacks import Callback

class Pace(Callback):
    def on_step_end(self, row):
        if Path("slowly").exists():
            time.sleep(0.3)
"""


class Case(NamedTuple):
    """How the processes of a job train, and what happens when one is lost.

    Attributes:
        replicas: of a quorum, or workers and servers; 1: a lost process is replaced.
        size: the processes of a replica.
        machines: emulated ones, which divide the processes; 0: all run on this one.
        share: how many of a thousand losses.
    """

    share: int
    replicas: int
    size: int
    parallel: Any = "ddp"
    sections: dict | None = None
    machines: int = 0

    @property
    def ranks(self):
        return self.replicas * self.size

    @property
    def is_replaced(self):
        return self.replicas == 1

    @property
    def servers(self):
        return (self.sections or {}).get("sync", {}).get("servers", 0)

    @property
    def steps(self):
        return 120 if self.is_replaced else 300

    def recipe(self):
        """The sections of the recipe, other than the data and the model."""
        train = {"steps": self.steps, "global_batch_size": 12, "log_every": 50, "eval_every": 15}
        train["callbacks"] = ["pace:Pace"]
        fault = {"hang_seconds": 120, "verify_replicas_every": None if self.is_replaced else 5}
        checkpoint = {"every": 25}
        sections = {"parallel": self.parallel, "train": train, "fault": fault, "checkpoint": checkpoint}
        if self.is_replaced:
            fault["on_lost_process"], checkpoint["snapshot_every_steps"] = "replace", 4
        else:
            if not self.servers:  # whose workers go on in any case
                fault["on_lost_process"], sections["sync"] = "continue", {"replicas": self.replicas}
            sections["optim"] = {"learning_rate": 1e-4}  # so that rounding does not grow over some hundred steps
        return {**sections, **(self.sections or {})}


CASES = {
    "replace, fsdp": Case(40, 1, 2, "fsdp"),
    "replace, pp": Case(40, 1, 2, {"pp": 2}),
    "replace, LoRA, fsdp": Case(30, 1, 2, "fsdp", LORA),
    "replace, hsdp": Case(20, 1, 4, "hsdp"),
    "replace, fsdp x tp": Case(20, 1, 4, SHARDED_TP),
    "replace, diloco, fsdp inside": Case(20, 1, 4, "fsdp", {"sync": {"name": "diloco", "replicas": 2, "every": 5}}),
    "replace, pp on 2 machines": Case(10, 1, 2, {"pp": 2}, machines=2),
    "replace, fsdp on 3 machines": Case(10, 1, 3, "fsdp", machines=3),
    "replace, fsdp x tp on 2 machines": Case(10, 1, 4, SHARDED_TP, machines=2),
    "quorum, ddp, 3 replicas on 3 machines": Case(25, 3, 1, machines=3),
    "quorum, fsdp x 2 on 2 machines": Case(15, 2, 2, "fsdp", machines=2),
    "quorum, fsdp x 2, each on 2 of 4 machines": Case(10, 2, 2, "fsdp", machines=4),
    "quorum, fsdp x 2": Case(40, 2, 2, "fsdp"),
    "quorum, LoRA, fsdp x 2": Case(20, 2, 2, "fsdp", LORA),
    "quorum, ddp, 3 replicas": Case(190, 3, 1),
    "quorum, ddp, 4 replicas": Case(190, 4, 1),
    "parameter server, 3 workers": Case(90, 3, 1, "ddp", {"sync": {**SERVER, "servers": 1}}),
    "parameter server, 2 of them, 4 workers": Case(90, 4, 1, "ddp", {"sync": {**SERVER, "servers": 2}}),
    "quorum, pp x 2": Case(40, 2, 2, {"pp": 2}),
    "quorum, tp x 2": Case(30, 2, 2, {"tp": 2}),
    "quorum, zero1 x 2": Case(30, 2, 2, "zero1"),
    "quorum, ddp x 2": Case(20, 2, 2),
    "quorum, fsdp x tp": Case(10, 2, 4, SHARDED_TP),
}  # fmt: skip


class LocalJob(Job):
    """A job of processes of this machine."""

    def __init__(self, folder, case):
        super().__init__(folder, case.steps, case.replicas, size=case.size)
        write_recipe(folder, **case.recipe())


class SpreadJob(Struck, HostJob):
    """A job on emulated machines, which divide its processes."""

    def __init__(self, network, case):
        Struck.__init__(self)
        self.network, self.size, self.nodes = network, case.ranks // len(network), str(len(network))
        self.folder, self.agents, self.late = network[0].folder, {}, set()
        self.run = RunFolder(self.folder / "runs" / "tiny")
        write_recipe(self.folder, **case.recipe())

    @property
    def process(self):
        return self.agents["node-1"]

    def read_pids(self):
        return {rank: pid for machine in self.network for rank, pid in workers(machine).items()}

    def lose(self, machine):
        """Kill all processes of a machine, and give its command there again."""
        self.strikes.append(Strike(frozenset(workers(machine).values()), self.last_step()))
        machine.kill()
        self.agents.pop(machine.name).communicate()
        self.begin(machine)
        self.late.add(machine.name)

    def end(self):
        """The run may end before a machine has returned: its command then finds no job."""
        out = self.process.communicate(timeout=PATIENCE_SECONDS)[0]
        assert self.process.returncode == 0, (out, self.events("failure", LOST, JOINED, REPLACED))
        for name, agent in self.agents.items():
            with suppress(subprocess.TimeoutExpired):
                out = agent.communicate(timeout=10 if name in self.late else PATIENCE_SECONDS)[0]
            assert agent.returncode == 0 or name in self.late, out


@contextmanager
def begin(folder, case):
    """Start a job; at the end no machine is left."""
    with machines(case.machines, folder) if case.machines else nullcontext() as network:
        yield (SpreadJob(network, case) if network else LocalJob(folder, case)).begin()


class Striker:
    """Loses processes of a job at random moments."""

    def __init__(self, job, case, draw):
        self.job, self.case, self.draw = job, case, draw
        self.slowly = job.folder / "slowly"

    def run(self, count):
        """Strike at most so many times, and some steps apart, until the run nears its end."""
        while len(self.job.strikes) < count:
            furthest = max((strike.step for strike in self.job.strikes), default=0)
            self.until(self.find_living)
            self.slowly.unlink(missing_ok=True)
            step = max(furthest + 1, self.job.last_step()) + self.draw.randrange(6)
            if not self.until(lambda least=step: self.job.last_step() >= least and self.find_living()):
                return
            time.sleep(self.draw.uniform(0, 0.2))
            if self.is_near_end():
                return
            recorded = self.count_recorded()
            if not self.case.is_replaced:
                self.slowly.touch()
            if not self.strike_machine():
                self.strike_process(is_alone=len(self.job.strikes) + 1 == count)
            self.job.until(lambda least=recorded: self.count_recorded() > least)
        self.slowly.unlink(missing_ok=True)

    def until(self, holds):
        """Wait until something holds, or until the run nears its end; return whether it is the former."""
        self.job.until(lambda: self.is_near_end() or holds())
        return not self.is_near_end()

    def is_near_end(self):
        return self.job.last_step() >= self.case.steps - 15

    def count_recorded(self):
        return len(self.job.events(LOST, REPLACED))

    def find_living(self):
        """The ranks of which one may be lost: those that train, of replicas that another one can spare."""
        if self.case.is_replaced:
            return list(range(self.case.ranks))
        settled = self.job.last_step() - 2
        last = {event["replica"]: event for event in self.job.events(LOST, JOINED)}
        out = {number for number, event in last.items() if event["event"] == LOST or event["step"] > settled}
        living = set(range(self.case.servers, self.case.replicas)) - out
        can_spare = self.case.replicas - len(out) >= 2
        size = self.case.size
        return [number * size + index for number in sorted(living) for index in range(size)] if can_spare else []

    def strike_machine(self):
        """Sometimes: all processes of a machine that is not the first."""
        if not self.case.machines or self.draw.random() > WHOLE_MACHINE:
            return False
        machine = self.draw.choice(self.job.network[1:])
        there = workers(machine).keys()
        if not there or not there <= set(self.find_living()):
            return False
        self.job.lose(machine)
        return True

    def strike_process(self, is_alone):
        """One, and sometimes, unless `is_alone`, a second one while the new process starts: that one, or another."""
        before, living = self.job.read_pids(), self.find_living()
        rank = self.draw.choice(living)
        self.job.strike(rank)
        if is_alone or self.draw.random() > DURING_RECOVERY:
            return
        if not self.until(lambda: self.job.read_pids().get(rank, before[rank]) != before[rank]):
            return
        time.sleep(self.draw.uniform(0, 1))
        others = [other for other in living if other != rank] if self.case.is_replaced and len(living) > 2 else []
        second = self.draw.choice([rank, *others])
        if not self.is_near_end():
            self.job.strike(second, is_starting=second == rank)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Trains as a case does, and loses nothing: with its processes, or in one if it is a quorum. The run."""
    found = {}

    def train(case):
        recipe = case.recipe()
        words = ["fault.on_lost_process=restart", "checkpoint.snapshot_every_steps=null"]
        if not case.is_replaced:
            words = ["sync={name: every_step}", "parallel=ddp", "fault.on_lost_process=restart"]
            recipe = {name: section for name, section in recipe.items() if name not in ("sync", "parallel")}
        ranks = case.ranks if case.is_replaced else 1
        key = json.dumps([ranks, recipe])
        if key not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            write_recipe(folder, **recipe)
            command = ("train", "recipe.json", "--nproc", str(ranks), *words)
            finish(start(*command, cwd=folder, OMP_NUM_THREADS="1"), PATIENCE_SECONDS).succeeded()
            found[key] = RunFolder(folder / "runs" / "tiny")
        return found[key]

    return train


def assert_as_undisturbed(case, run, whole):
    """Compare rows and last weights with those of the run that lost nothing; no job may have restarted."""
    names = [event["event"] for event in read_lines(run.events_path)]
    assert not {"restart", "failure", "replicas_differ", "save_failed"} & set(names), names
    assert names.count("done") == 1
    tensors, expected = (tensors_of(each.path, case.steps) for each in (run, whole))
    if case.is_replaced:
        assert read_exact(run) == read_exact(whole)
        assert equal_tensors(tensors, expected)
        return
    assert names.count("start") == 1 and "resume" not in names
    assert_same_rows(run, read_lines(whole.metrics_path))
    weights, others = ({name for name in each if name.startswith("model.")} for each in (tensors, expected))
    assert weights == others and weights
    for name in weights:
        assert (tensors[name] - expected[name]).abs().max() < TOLERANCE, name


def count_losses(case):
    if COUNT is None:
        return AT_ONCE
    return round(int(COUNT) * case.share / sum(case.share for case in CASES.values()))


@pytest.mark.parametrize("name", CASES)
def test_losses_at_random_moments(tmp_path, monkeypatch, undisturbed, name):
    """In as many runs as the losses need."""
    case, losses = CASES[name], []
    if case.machines and (reason := namespaces_allowed()):
        pytest.skip(reason)
    draw, count = random.Random(f"{SEED} {name}"), count_losses(case)
    (tmp_path / "pace.py").write_text(PACE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    while len(losses) < count:
        folder = tmp_path / str(len(losses))
        folder.mkdir()
        with begin(folder, case) as job:
            Striker(job, case, draw).run(count - len(losses))
            job.end()
        assert job.strikes, "the run is too short for one loss"
        losses += job.describe_losses()
        assert_as_undisturbed(case, job.run, undisturbed(case))
        print(f"{name}: {len(losses)} losses")
        keep(name, RANDOM, losses, MACHINES if case.machines else PROCESSES)
