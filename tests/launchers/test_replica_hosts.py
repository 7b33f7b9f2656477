"""Local SGD, DiLoCo and parameter servers on two machines: started by ssh, torchrun and agents, and by a kill."""

import os
import sys

import psutil
import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import await_line, finish, read_events, start, train_rows, write_recipe
from tests.launchers.secure_shell import serve_ssh, ssh_missing
from tests.launchers.test_lost_machines import PIPES, start_agent
from tests.launchers.test_lost_machines import finish as finish_agents
from tests.launchers.test_ssh_hosts import keys
from tests.launchers.test_ssh_hosts import run as run_on
from tests.namespaces import machines

pytestmark = needs_machines(ssh_missing())

WAYS = {
    "local SGD": {"name": "local_sgd", "every": 2},
    "DiLoCo": {"name": "diloco", "every": 2, "compress": {"method": "int8"}},
    "servers": {"name": "parameter_server", "servers": 2},
    "asynchronous servers": {"name": "parameter_server", "max_staleness": 2},
}


def train_here(folder):
    """The rows of the same recipe on one machine, with two processes."""
    command = ("train", "recipe.json", "--nproc", "2", "run.name=here")
    finish(start(*command, cwd=folder, OMP_NUM_THREADS="1"), 120).succeeded()
    return train_rows(RunFolder(folder / "runs" / "here"))


def assert_same(ours, theirs, sync):
    """The same batches, and the same losses unless they depend on time."""
    assert [(row["step"], row["batch_hash"]) for row in ours] == [(row["step"], row["batch_hash"]) for row in theirs]
    if not sync.get("max_staleness"):
        assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-6)


@pytest.mark.parametrize("sync", WAYS.values(), ids=WAYS)
def test_launched_by_ssh(tmp_path, sync):
    write_recipe(tmp_path, sync=sync, parallel="ddp", launch={"nproc_per_node": 1})
    with machines(3, tmp_path) as (first, second, desk):
        options = serve_ssh((first, second), tmp_path / "keys")
        words = ["recipe.json", "--to", "torchrun", "--hosts", "node-1,node-2", *keys(options), "--follow"]
        code, out, err = run_on(desk, "launch", *words)
    assert code == 0, out + err
    assert f"sync: {sync['name']}, 2 " in out
    assert_same(train_rows(RunFolder(tmp_path / "runs" / "tiny")), train_here(tmp_path), sync)


@pytest.mark.parametrize("sync", WAYS.values(), ids=WAYS)
def test_started_by_plain_torchrun(tmp_path, sync):
    write_recipe(tmp_path, sync=sync, parallel="ddp")
    line = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node-1:29400 -m echelon train recipe.json"
    command = [sys.executable, "-m", "torch.distributed.run", *line.split()]
    with machines(2, tmp_path) as network:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        codes, outputs = finish_agents(*(each.start(command, env=environment, **PIPES) for each in network))
    assert codes == [0, 0], outputs
    assert_same(train_rows(RunFolder(tmp_path / "runs" / "tiny")), train_here(tmp_path), sync)


@pytest.mark.parametrize("sync", WAYS.values(), ids=WAYS)
def test_a_process_killed_on_one_machine_restarts_all(tmp_path, sync):
    """The killed process is a worker that is no server, where the servers are fewer than the workers."""
    steps = 60
    write_recipe(tmp_path, train={"steps": steps, "log_every": 500}, checkpoint={"every": 10}, sync=sync,
                 parallel="ddp")  # fmt: skip
    run = RunFolder(tmp_path / "runs" / "tiny")
    with machines(2, tmp_path) as network:
        agents = [start_agent(machine, "2") for machine in network]
        await_line(run.metrics_path, '"step": 15,', agents[0], 120)
        find_rank(agents[1]).kill()
        codes, outputs = finish_agents(*agents)
    assert codes == [0, 0], outputs
    assert len(read_events(run, "restart")) == 1 and not read_events(run, "replica_lost")
    ours = train_rows(run)
    assert [row["step"] for row in ours] == list(range(1, steps + 1))
    assert_same(ours, train_here(tmp_path), sync)


def find_rank(agent):
    """The rank that an agent has started."""
    [rank] = [each for each in psutil.Process(agent.pid).children(recursive=True) if "RANK" in each.environ()]
    return rank
