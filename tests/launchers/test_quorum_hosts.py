"""A quorum of replicas on several machines, as network namespaces with shared files: processes, machines and links are
lost, and the rows are those of one process. With `make losses` how long each loss held up the others is written to
benchmarks/results/lost-processes-cpu.md."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import finish, read_lines, start, write_recipe
from tests.faults.losses import JOINED, LOST, MACHINES, Loss, keep
from tests.faults.test_quorum import MODEL, assert_same_rows
from tests.namespaces import machines
from tests.waiting import wait_until

pytestmark = needs_machines()
# So that steps are slow, without work for this machine: the gradients of one have 0.3 MB.
MEGABITS = 10
PATIENCE_SECONDS = 300
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


class Job:
    """A quorum on emulated machines, `size` processes on each, and what a test does to it.

    `spares`: so many of the machines wait.
    """

    def __init__(self, network, size=1, parallel="ddp", steps=100_000, spares=0, rate=1e-4, **sync):
        self.network, self.size = network, size
        self.nodes = f"{len(network) - spares}+{spares}" if spares else str(len(network))
        for machine in network:
            machine.slow(MEGABITS)
        self.folder = network[0].folder
        self.run = RunFolder(self.folder / "runs" / "tiny")
        write_recipe(
            self.folder, model={"config": MODEL}, parallel=parallel, checkpoint={"every": 20},
            train={"steps": steps, "global_batch_size": 12, "log_every": 500, "eval_every": 40},
            optim={"learning_rate": rate},  # so that rounding does not grow over some hundred steps
            sync={"replicas": len(network) - spares, **sync},
            fault={"hang_seconds": 120, "on_lost_process": "continue"},
        )  # fmt: skip
        self.case = f"quorum, {parallel}"
        self.agents, self.losses = {}, {}

    def begin(self, *chosen):
        """Start the agents of all machines, or of some."""
        command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", str(self.size)]
        command += ["--nodes", self.nodes, "--rendezvous", "node-1:29400"]
        for machine in chosen or self.network:
            self.agents[machine.name] = machine.start(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **PIPES)
        return self

    def events(self, *names):
        rows = read_lines(self.run.events_path) if self.run.events_path.exists() else []
        return [row for row in rows if row["event"] in names]

    def until(self, holds, agent="node-1"):
        """Wait until something holds, while the agent of a machine runs, by default that of the first one."""
        wait_until(
            holds,
            PATIENCE_SECONDS,
            self.agents[agent],
            say=lambda: (self.run.rows.last_step(), self.events(LOST, JOINED)),
        )

    def last_step(self):
        return (self.run.rows.last_step() or 0) if self.run.metrics_path.exists() else 0

    def until_step(self, step, agent="node-1"):
        self.until(lambda: self.last_step() >= step, agent)

    def until_lost(self, fault, count=1):
        """Wait until the others have gone on after so many losses; remember how long after now that was."""
        began, step = time.time(), self.last_step()
        self.until(lambda: len(self.events(LOST)) >= count)
        event = self.events(LOST)[-1]
        self.losses[fault] = [Loss(event["time"] - began, None, max(0, step - event["step"]))]

    def keep_losses(self, outcome="went on"):
        """Write down what the losses have cost."""
        for fault, losses in self.losses.items():
            keep(self.case, fault, losses, MACHINES, outcome)

    def assert_stop_without_the_first(self):
        """Kill all processes of the first of two machines: the other one stops; remember how long that takes."""
        first, second = self.network
        began, step = time.time(), self.last_step()
        first.kill()
        assert self.agents["node-2"].wait(PATIENCE_SECONDS) == 1 and not workers(second)
        fault = "all processes of the first machine, which writes the files and keeps the store"
        self.losses[fault] = [Loss(time.time() - began, None, step - (self.run.newest_step() or 0))]

    def end(self):
        """Wait for the agents; their exit codes by machine, and their outputs."""
        self.outputs = {name: agent.communicate(timeout=PATIENCE_SECONDS)[0] for name, agent in self.agents.items()}
        return {name: agent.returncode for name, agent in self.agents.items()}, self.outputs

    def stop(self, agent="node-1"):
        """Train some steps more, and stop all machines by a signal to one, by default the first; as `end`."""
        self.until_step(self.last_step() + 5, agent)
        self.agents[agent].terminate()
        return self.end()

    def assert_never_restarted(self):
        names = [event["event"] for event in self.events("restart", "failure", "resume", "start")]
        assert names == ["start"], names

    def assert_same_as_alone(self, outcome="went on"):
        """The rows are those of the same training in one process, which is stopped when it has as many."""
        run, last = RunFolder(self.folder / "runs" / "alone"), self.last_step()
        words = ["run.dir=runs/alone", "sync={name: every_step}", "fault.on_lost_process=restart", "parallel=ddp"]
        process = start("train", "recipe.json", "--nproc", "1", *words, cwd=self.folder, OMP_NUM_THREADS="1")
        wait_until(lambda: run.metrics_path.exists() and (run.rows.last_step() or 0) > last, PATIENCE_SECONDS, process)
        process.terminate()
        assert finish(process, PATIENCE_SECONDS).code == 3
        assert last >= 10
        assert_same_rows(self.run, read_lines(run.metrics_path), last)
        self.keep_losses(outcome)


def workers(machine):
    """The training processes of a machine, by the ranks of the logs that they write."""
    listed = subprocess.run(["ip", "netns", "pids", machine.namespace], capture_output=True, text=True).stdout.split()
    found = {}
    for pid in listed:
        with suppress(OSError):  # it has ended
            if log := re.search(r"rank-(\d+)\.log$", os.readlink(f"/proc/{pid}/fd/1")):
                found[int(log[1])] = int(pid)
    return found


def test_a_lost_process_costs_one_step(tmp_path):
    """Of another machine, then of the keeper's; each returns."""
    with machines(3, tmp_path) as network:  # a machine that is alone would not be slowed by its link
        job = Job(network).begin()
        for number, machine in enumerate((network[2], network[0])):
            job.until_step(job.last_step() + 5)
            [pid] = workers(machine).values()
            os.kill(pid, signal.SIGKILL)
            job.until_lost(f"a process of {('another machine', 'the first machine')[number]} of 3", number + 1)
            job.until(lambda before=number: len(job.events(JOINED)) > before)
        codes, outputs = job.stop()
    assert set(codes.values()) == {3}, outputs
    job.assert_never_restarted()
    job.assert_same_as_alone()


@pytest.mark.parametrize(("size", "parallel"), [(1, "ddp"), (2, "fsdp")])
def test_a_lost_machine_costs_one_step_and_may_return(tmp_path, size, parallel):
    """Without power: its connections are not closed. Then the same command is given there again."""
    with machines(3, tmp_path) as network:
        job = Job(network, size, parallel).begin()
        last = network[-1]
        job.until_step(5)
        last.cut()
        last.kill()
        job.until_lost("a machine of 3, which loses its power")
        job.agents.pop(last.name).communicate()
        last.heal()
        job.begin(last)
        job.until(lambda: job.events(JOINED))
        codes, outputs = job.stop()
    assert set(codes.values()) == {3}, outputs
    assert f"was lost with its machine {last.name}" in "".join(outputs.values())
    job.assert_never_restarted()
    job.assert_same_as_alone()


def test_a_spare_takes_the_place_of_a_lost_machine(tmp_path):
    with machines(3, tmp_path) as network:
        job = Job(network, spares=1).begin(*network[:2])
        job.until_step(5)
        job.begin(network[2])
        job.until_step(10)
        assert not workers(network[2])
        network[1].kill()
        job.until(lambda: job.events(JOINED))
        job.agents.pop(network[1].name).communicate()
        assert workers(network[2])
        codes, outputs = job.stop()
    assert set(codes.values()) == {3}, outputs
    job.assert_never_restarted()
    job.assert_same_as_alone()


def test_a_replica_of_two_machines_is_lost_with_one_of_them(tmp_path):
    """The other machine's part of the replica ends too, and both start again once the machine has returned."""
    with machines(4, tmp_path) as network:
        job = Job(network, 1, "fsdp", replicas=2).begin()
        job.until_step(5)
        by_rank = {rank: machine for machine in network for rank in workers(machine)}
        killed, other = by_rank[3], by_rank[2]  # places are given in the order in which machines come
        before = workers(other)
        killed.kill()  # its connections are closed
        job.until_lost("all processes of a machine of 4, where a replica is on two")
        job.until(lambda: workers(other) != before)
        job.agents.pop(killed.name).communicate()
        job.begin(killed)
        job.until(lambda: job.events(JOINED))
        assert workers(other).keys() == before.keys() and workers(other) != before
        codes, outputs = job.stop()
    assert set(codes.values()) == {3}, outputs
    job.assert_never_restarted()
    job.assert_same_as_alone()


def test_a_machine_that_is_cut_off_stops_by_itself(tmp_path):
    """It has the process that writes the run's files: the first one has died before, and come back as the last."""
    with machines(3, tmp_path) as network:
        job = Job(network).begin()
        job.until_step(5)
        os.kill(workers(network[0])[0], signal.SIGKILL)
        job.until(lambda: job.events(JOINED))
        [cut] = [machine for machine in network if 1 in workers(machine)]
        cut.cut()
        job.until_lost("a machine of 3, which is cut off (a partition)", 2)
        job.until(lambda: not workers(cut))
        assert job.agents[cut.name].wait(PATIENCE_SECONDS) == 1
        codes, outputs = job.stop()
    assert codes == {machine.name: 1 if machine is cut else 3 for machine in network}, outputs
    assert "is gone or unreachable" in outputs[cut.name]
    job.assert_never_restarted()
    steps = [event["step"] for event in job.events("checkpoint")]
    assert steps == sorted(set(steps)), steps
    job.assert_same_as_alone()


def test_without_the_first_machine_of_two_all_stop_and_the_same_command_resumes(tmp_path):
    with machines(2, tmp_path) as network:
        job = Job(network).begin()
        job.until(lambda: job.events("checkpoint"))
        job.assert_stop_without_the_first()
        assert "start the same command again on the remaining machines" in job.agents["node-2"].communicate()[0]
        job.agents["node-1"].communicate()
        job.begin()
        job.until(lambda: job.events("resume"))
        codes, outputs = job.stop()
    assert set(codes.values()) == {3}, outputs
    job.assert_same_as_alone("stopped; the same command resumed")


def test_a_run_ends_without_a_lost_machine(tmp_path):
    with machines(2, tmp_path) as network:
        job = Job(network, steps=40).begin()
        job.until_step(5)
        network[1].kill()
        codes, outputs = job.end()
    assert codes["node-1"] == 0, outputs
    assert job.run.is_finished() and job.last_step() == 40


@pytest.mark.parametrize(
    ("words", "said"), [(["--nodes", "1:2"], "use --nodes 2"), (["--nodes", "2", "data.train=no.txt"], "no.txt")]
)
def test_what_cannot_run_is_refused_on_all_machines(tmp_path, words, said):
    with machines(2, tmp_path) as network:
        Job(network)
        command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1", *words]
        agents = [machine.start([*command, "--rendezvous", "node-1:29400"], **PIPES) for machine in network]
        outputs = [agent.communicate(timeout=PATIENCE_SECONDS)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [2, 2], outputs
    assert said in outputs[0] and not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()
