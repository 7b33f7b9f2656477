"""Lost processes and machines are replaced (`fault.on_lost_process: replace`) in a job of several machines, which are
network namespaces with shared files: rows and weights are those of a run that lost nothing, bit for bit."""

import os
import signal
import subprocess
from contextlib import suppress

import psutil

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import finish, start, write_recipe
from tests.faults.losses import Loss
from tests.faults.test_quorum_plans import LLAMA
from tests.faults.test_replaced_processes import read_exact
from tests.launchers.test_quorum_hosts import PATIENCE_SECONDS, Job, workers
from tests.namespaces import machines
from tests.parity.training import equal_tensors, tensors_of

pytestmark = needs_machines()
STEPS, RARELY = 60, 1000
LOST = "process_lost"


class RankJob(Job):
    """A job on emulated machines in which lost ranks are replaced; it saves at its end alone."""

    def __init__(self, network, size=1, parallel="fsdp"):
        super().__init__(network, size, parallel)
        write_recipe(
            self.folder, model={"config": LLAMA}, parallel=parallel,
            train={"steps": STEPS, "global_batch_size": 12, "log_every": 20, "eval_every": 25},
            checkpoint={"every": RARELY, "snapshot_every_steps": 4},
            fault={"on_lost_process": "replace", "hang_seconds": 120},
        )  # fmt: skip
        self.case = f"replace, {'fsdp x tp' if isinstance(parallel, dict) else parallel}"

    def until_replaced(self, fault, count):
        """Wait until all go on after so many losses; remember what the last one has cost."""
        step = self.last_step()
        self.until(lambda: len(self.events(LOST)) >= count)
        event = self.events(LOST)[-1]
        self.losses[fault] = [Loss(event["seconds"], event["seconds"], max(0, step - event["step"]))]

    def assert_as_undisturbed(self):
        """Compare with the same number of processes on one machine, which lose nothing."""
        assert not self.events("restart", "failure", "save_failed"), self.outputs
        assert all(row["step"] % 4 == 0 and row["step"] for row in self.events("resume")), self.events("resume")
        whole, count = RunFolder(self.folder / "runs" / "whole"), self.size * len(self.network)
        plain = ("fault.on_lost_process=restart", "checkpoint.snapshot_every_steps=null", "run.dir=runs/whole")
        command = ("train", "recipe.json", "--nproc", str(count), *plain)
        finish(start(*command, cwd=self.folder, OMP_NUM_THREADS="1"), PATIENCE_SECONDS).succeeded()
        assert read_exact(self.run) == read_exact(whole)
        assert equal_tensors(tensors_of(self.run.path, STEPS), tensors_of(whole.path, STEPS))
        self.keep_losses()


def forks_workers(machine):
    """Whether a process of a machine holds the imports of the workers, which a new one then need not do."""
    listed = subprocess.run(["ip", "netns", "pids", machine.namespace], capture_output=True, text=True).stdout.split()
    words = []
    for pid in listed:
        with suppress(psutil.Error):  # it has ended
            words += psutil.Process(int(pid)).cmdline()
    return any("warm_worker" in word for word in words)


def test_a_lost_process_of_any_machine_is_replaced(tmp_path):
    """Of another machine, then of the first; the processes of the others stay. New ones are forked."""
    with machines(2, tmp_path) as network:
        job = RankJob(network, size=2, parallel={"dp_shard": 2, "tp": 2}).begin()
        for number, machine in enumerate((network[1], network[0])):
            job.until_step(10 * (1 + number))
            assert forks_workers(machine)
            kept = workers(network[1 - network.index(machine)])
            os.kill(min(workers(machine).values()), signal.SIGKILL)
            job.until_replaced(f"a process of {('another machine', 'the first machine')[number]} of 2", number + 1)
            assert workers(network[1 - network.index(machine)]) == kept
        codes, outputs = job.end()
    assert set(codes.values()) == {0}, outputs
    job.assert_as_undisturbed()


def test_a_lost_machine_returns_and_gets_its_state_from_another_one(tmp_path):
    """Without power: its connections are not closed. No checkpoint was saved before."""
    with machines(3, tmp_path) as network:
        job = RankJob(network).begin()
        job.until_step(10)
        last = network[-1]
        last.cut()
        last.kill()
        job.agents.pop(last.name).communicate()
        last.heal()
        job.begin(last)
        job.until_replaced("a machine of 3, which loses its power and returns", 1)
        codes, outputs = job.end()
    assert set(codes.values()) == {0}, outputs
    assert f"was lost with its machine {last.name}" in "".join(outputs.values())
    job.assert_as_undisturbed()


def test_without_the_first_machine_all_stop(tmp_path):
    with machines(2, tmp_path) as network:
        job = RankJob(network).begin()
        job.until_step(5)
        job.assert_stop_without_the_first()
        job.agents["node-1"].communicate()
        job.agents["node-2"].communicate()
        job.begin()
        codes, outputs = job.end()
    assert set(codes.values()) == {0}, outputs
    job.keep_losses("stopped; the same command began again")
