"""A real Ray cluster of a head and three machines: jobs, cancelled ones, killed machines, a sweep, refusals."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from echelon.ground.stored import read_json
from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import read_lines, write_recipe
from tests.launchers.ray_cluster import ray_cluster, ray_missing
from tests.namespaces import machines
from tests.parity.training import LOSS
from tests.waiting import wait_until

pytestmark = needs_machines(ray_missing())

SOURCE = Path(__file__).parents[2] / "src"
GENTLE = {"learning_rate": 1e-4}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Machines and a Ray cluster on them: node-1 is its head, node-2 to node-4 have a CPU core each."""
    folder = tmp_path_factory.mktemp("ray")
    with machines(4, folder) as network, ray_cluster(network) as found:
        found.machines = {machine.name: machine for machine in network}
        yield found


class Desk:
    """A terminal on the head's machine, in a working directory that all machines share."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        self.run = RunFolder(folder / "runs" / "tiny")

    def write(self, launch=None, **sections):
        ray = {"address": self.cluster.address, "gpus_per_node": 0, "wait_seconds": 60}
        given = launch or {}
        env = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        settings = {"nproc_per_node": 1, "python": sys.executable, "env": env, "to": "ray"}
        launch = settings | given | {"ray": ray | given.get("ray", {})}
        write_recipe(self.folder, launch=launch, optim=GENTLE, **sections)

    def start(self, *arguments):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-m", "echelon", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
        return self.cluster.head.start(command, env=environment, cwd=self.folder, **pipes)

    def __call__(self, *arguments, seconds=240):
        process = self.start(*arguments)
        out = process.communicate(timeout=seconds)[0]
        return process.returncode, out

    def launch(self, *arguments):
        """Launch without waiting for its end; returns the job's name."""
        code, out = self("launch", "recipe.json", *arguments)
        assert code == 0, out
        return re.search(r"launched (\S+)", out)[1]

    def await_state(self, job, words, seconds=180):
        until = time.monotonic() + seconds
        while words not in (out := self("status", job)[1]):
            assert time.monotonic() < until, (out, self("logs", job)[1])
            time.sleep(1)
        return out

    def await_step(self, step, job, seconds=120):
        wait_until(
            lambda: (rows := self.rows()) and rows[-1]["step"] >= step, seconds, say=lambda: self("logs", job)[1]
        )

    def await_log(self, job, words, seconds=120):
        until = time.monotonic() + seconds
        while words not in (out := self("logs", job)[1]):
            assert time.monotonic() < until, out
            time.sleep(1)
        return out

    def rows(self):
        if not self.run.metrics_path.exists():
            return []
        return [row for row in read_lines(self.run.metrics_path) if row["kind"] == "train"]


@pytest.fixture
def desk(cluster, tmp_path):
    return Desk(cluster, tmp_path)


def train_alone(folder, **sections):
    """The rows of the same recipe trained by one process."""
    folder.mkdir()
    write_recipe(folder, optim=GENTLE, **sections)
    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return [row for row in read_lines(RunFolder(folder / "runs" / "tiny").metrics_path) if row["kind"] == "train"]


def assert_same(ours, theirs):
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert [row["batch_hash"] for row in ours] == [row["batch_hash"] for row in theirs]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)) <= LOSS


def test_three_machines_train_to_the_end_and_equal_one_process(desk, tmp_path):
    train = {"steps": 24, "global_batch_size": 6, "log_every": 500}
    desk.write({"nodes": 3, "setup": ["echo setup on $ON_THIS_MACHINE"]}, train=train)
    code, out = desk("launch", "recipe.json", "--follow")
    assert code == 0, out
    rendezvous = re.search(r"trains on 3 machine\(s\): (.*); they meet at (\S+):", out)
    assert set(rendezvous[1].split(", ")) == {"node-2", "node-3", "node-4"}
    assert rendezvous[2] in {"10.87.0.2", "10.87.0.3", "10.87.0.4"}  # not the head's
    for name in ("node-2", "node-3", "node-4"):  # what `ray start` was given reaches the agents
        assert f"{name} | setup on {name}" in out
    assert "plan: ddp on 3 processes" in out
    [job] = [path.name for path in (tmp_path / "jobs").iterdir()]
    assert "done  Ray job SUCCEEDED  step 24" in desk("status", job)[1]
    assert "done: 24 steps" in desk("logs", job)[1]
    assert "has ended already" in desk("cancel", job)[1]
    assert_same(desk.rows(), train_alone(tmp_path / "alone", train=train))


def test_a_cancelled_job_saves_and_the_next_one_resumes_it(desk):
    desk.write({"nodes": 2}, train={"steps": 600, "log_every": 500})
    job = desk.launch()  # the terminal is gone; the cluster has the job
    desk.await_step(20, job)
    assert "running  Ray job RUNNING" in desk("status", job)[1]
    assert desk("cancel", job)[0] == 0
    out = desk.await_state(job, "stopped")
    assert "Ray job STOPPED" in out
    stopped_at = desk.run.newest_step()
    assert 20 <= stopped_at < 600
    code, out = desk("launch", "recipe.json", "--follow")
    assert code == 0 and f"Resuming from step-{stopped_at:08d}" in out, out
    assert [row["step"] for row in desk.rows()] == list(range(1, 601))


def test_a_lost_machine_is_replaced_and_training_resumes_from_a_checkpoint(desk, cluster, tmp_path):
    train = {"steps": 400, "log_every": 500}
    desk.write({"nodes": 2}, train=train, checkpoint={"every": 20})
    job = desk.launch()
    desk.await_step(50, job)
    names = re.search(r"trains on 2 machine\(s\): (\S+), (\S+);", desk("logs", job)[1])
    lost = cluster.machines[names[2]]
    cluster.kill_node(lost)
    try:
        out = desk.await_state(job, "done")
        assert "step 400" in out
        log = desk("logs", job)[1]
        assert f"ray: {lost.name} is lost" in log
        assert "restart 1 of 3, because a machine was lost" in log
        assert re.search(r"Resuming from step-00000\d\d0", log), log
        assert_same(desk.rows(), train_alone(tmp_path / "alone", train=train))
    finally:
        cluster.start_node(lost)
        cluster.await_nodes()


HALF = {"resources": {"CPU": 0, "half": 1}}


@pytest.mark.parametrize(("nodes", "bundle", "index"), [("1:3", {}, 2), ("2:3", HALF, 1)], ids=["whole", "half"])
def test_an_elastic_job_goes_on_without_a_lost_machine_and_takes_it_back(desk, cluster, nodes, bundle, index):
    """The second time one of the fewest machines, whose bundle Ray moves to the third, which has an agent already."""
    train = {"steps": 100_000, "global_batch_size": 6, "log_every": 500}
    desk.write({"nodes": nodes, "ray": bundle}, train=train, checkpoint={"every": 50})
    job = desk.launch()
    desk.await_log(job, "plan: ddp on 3 processes")
    desk.await_step(20, job)
    hosts = re.search(r"trains on 3 machine\(s\): (.*);", desk("logs", job)[1])[1].split(", ")
    lost = cluster.machines[hosts[index]]
    cluster.kill_node(lost)
    try:
        log = desk.await_log(job, "plan: ddp on 2 processes")
        assert f"ray: {lost.name} is lost" in log and "because a machine was lost" not in log
    finally:
        cluster.start_node(lost)
        cluster.await_nodes()
    log = desk.await_log(job, f"ray: {lost.name} joins")
    assert log.count(" joins") == 1
    wait_until(
        lambda: desk("logs", job)[1].count("plan: ddp on 3 processes") >= 2, 120, say=lambda: desk("logs", job)[1]
    )
    assert desk("cancel", job)[0] == 0
    desk.await_state(job, "stopped")
    steps = [row["step"] for row in desk.rows()]
    assert steps == list(range(1, len(steps) + 1))


def test_a_killed_ray_worker_takes_its_agent_along_and_is_replaced(desk):
    desk.write({"nodes": 1}, train={"steps": 600, "log_every": 500}, checkpoint={"every": 20})
    job = desk.launch()
    desk.await_step(30, job)
    workers = [process for process in psutil.process_iter() if process.name().startswith("ray::RayMachine")]
    # Another Ray on this machine has its own folder.
    [worker] = [process for process in workers if Path(process.cwd()).is_relative_to(desk.cluster.folder)]
    agents = worker.children(recursive=True)
    assert any("echelon" in " ".join(agent.cmdline()) for agent in agents)
    worker.kill()  # as Ray does when a machine's memory is full
    _, left = psutil.wait_procs(agents, timeout=60)
    assert not left
    desk.await_state(job, "done  Ray job SUCCEEDED  step 600")
    log = desk("logs", job)[1]
    assert "is lost: Ray's worker there has ended" in log and "restart 1 of 3" in log


def test_a_sweep_runs_its_trials_as_jobs_and_one_more_than_there_are_machines_waits(desk, tmp_path):
    desk.write(train={"steps": 6}, launch={"ray": {"wait_seconds": 600}})
    rates = [1e-4, 2e-4, 3e-4, 4e-4]
    sweep = {"sweep": {"name": "lr", "sampler": "grid", "parallel": 4, "metric": "train_loss"}}
    searched = {"recipe": "recipe.json", "search": {"optim.learning_rate": rates}}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep | searched))
    code, out = desk("sweep", "sweep.yaml", "--to", "ray", seconds=900)
    assert code == 0, out
    trials = json.loads((tmp_path / "sweeps" / "lr" / "results.json").read_text())["trials"]
    values = {trial["parameters"]["optim.learning_rate"]: trial["value"] for trial in trials}
    assert sorted(values) == rates and {trial["state"] for trial in trials} == {"done"}, trials
    records = [read_json(path) for path in tmp_path.glob("sweeps/lr/jobs/*/job.json")]
    assert [record["target"] for record in records] == ["ray"] * 4
    alone = train_alone(tmp_path / "alone", train={"steps": 6})
    mean = sum(row["loss"] for row in alone) / len(alone)
    assert values[1e-4] == pytest.approx(mean, abs=LOSS)


def test_refusals_have_one_message_each(desk, tmp_path):
    desk.write({"nodes": 5, "ray": {"wait_seconds": 3}})
    code, out = desk("launch", "recipe.json", "--follow")
    assert code == 1, out
    assert "Ray did not find 5 machine(s) with 1 CPU each within launch.ray.wait_seconds=3" in out
    assert "of the 4 machine(s) of the cluster 3 have as much" in out
    [job] = [path.name for path in (tmp_path / "jobs").iterdir()]
    status = desk("status", job)[1]
    assert "failed  Ray job FAILED, exit code 1: Ray did not find 5 machine(s)" in status
    time.sleep(1)  # a job's name contains the time in seconds
    desk.write({"nodes": 2, "ray": {"workdir": "/not/shared"}})
    code, out = desk("launch", "recipe.json", "--follow")
    assert code == 2 and "echelon: /not/shared is no folder on node-" in out, out
    time.sleep(1)
    desk.write({"nodes": "1:3"}, train={"global_batch_size": 4})  # not divisible by 3 processes
    code, out = desk("launch", "recipe.json", "--follow")
    assert code == 2 and "train.global_batch_size=4 does not divide by the 3 ranks" in out, out
    desk.write({"ray": {"address": "http://10.87.0.4:8265"}})
    code, out = desk("launch", "recipe.json")
    assert code == 1
    assert "launch.ray.address=http://10.87.0.4:8265: nothing answers there as Ray's dashboard" in out
