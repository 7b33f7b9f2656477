"""Several machines, as network namespaces with shared files: equality with one process, cut links, lost hosts."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import await_line, read_events, train_rows, write_recipe
from tests.dist.test_elastic import await_count
from tests.namespaces import machines
from tests.parity.training import LOSS

pytestmark = needs_machines()

# A low learning rate, so that rounding differences do not grow over many steps.
GENTLE = {"learning_rate": 1e-4}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def write_saving_recipe(folder, steps, policy="restart"):
    """Write a recipe that saves often, so that a loss repeats few steps; return the folder of its run."""
    write_recipe(
        folder,
        train={"steps": steps, "log_every": 500},
        optim=GENTLE,
        checkpoint={"every": 50},
        fault={"hang_seconds": 10, "on_lost_process": policy},
        **({"sync": {"replicas": 2}} if policy == "continue" else {}),
    )
    return RunFolder(folder / "runs" / "tiny")


def find_coordinator(machine, place):
    """The machine that coordinates the job whose agents meet there, as another one sees it."""
    look = (
        "import sys; from echelon.ground.hosts import parse_group as parse; "
        "from echelon.run.supervise.etcd_store import EtcdStore; "
        "print(EtcdStore(parse('2', sys.argv[1])).find_coordinator())"
    )
    return machine.start([sys.executable, "-c", look, place], **PIPES).communicate(timeout=60)[0].strip()


def start_agent(machine, nodes, *more, rendezvous="node-1:29400", **popen):
    """Start echelon as the agent of a machine, with one process."""
    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1", "--nodes", nodes]
    settings = {"env": os.environ | {"OMP_NUM_THREADS": "1"}} | PIPES | popen
    return machine.start([*command, "--rendezvous", rendezvous, *more], **settings)


def finish(*processes, seconds=120):
    """Wait for the agents; return their exit codes and outputs."""
    outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    return [process.returncode for process in processes], outputs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The rows of the same recipe trained by one process, by number of steps."""
    found = {}

    def train(steps):
        if steps not in found:
            folder = tmp_path_factory.mktemp("whole")
            write_recipe(folder, train={"steps": steps, "log_every": 500}, optim=GENTLE)
            command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            found[steps] = train_rows(RunFolder(folder / "runs" / "tiny"))
        return found[steps]

    return train


def assert_same(ours, theirs):
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for key in ("batch_hash", "tokens", "learning_rate"):
        assert [row[key] for row in ours] == [row[key] for row in theirs], key
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)) <= LOSS


def test_two_machines_equal_one_process(tmp_path, whole):
    write_recipe(tmp_path, train={"steps": 40, "log_every": 500}, optim=GENTLE)
    with machines(2, tmp_path) as network:
        codes, outputs = finish(*(start_agent(machine, "2") for machine in network))
    assert codes == [0, 0], outputs
    assert "plan: ddp on 2 process" in outputs[0] + outputs[1]
    assert_same(train_rows(RunFolder(tmp_path / "runs" / "tiny")), whole(40))


def test_a_lost_host_shrinks_the_run_and_a_new_one_grows_it(tmp_path, whole):
    """The lost host is disconnected first, so that its connections are not closed."""
    steps = 1500
    run = write_saving_recipe(tmp_path, steps)
    with machines(3, tmp_path) as (first, second, third):
        lasting, lost = start_agent(first, "1:2"), start_agent(second, "1:2")
        await_line(run.metrics_path, '"step": 60,', lasting, 120)
        second.cut()
        second.kill()
        lost_at = time.monotonic()
        await_count(run, "recovered", 1, lasting)
        assert time.monotonic() - lost_at < 90
        finish(lost)
        new = start_agent(third, "1:2")
        await_count(run, "recovered", 2, lasting)
        codes, outputs = finish(lasting, new, seconds=300)
    assert codes == [0, 0], outputs
    assert [outputs[0].count(f"plan: ddp on {count} process") for count in (1, 2)] == [1, 2], outputs[0]
    after_loss = outputs[0].partition("restart 1 of ")[2] + outputs[1]
    assert after_loss.count("useful time (goodput)") == 1, after_loss  # not where the new host joins
    assert_same(train_rows(run), whole(steps))


def test_a_spare_takes_the_place_of_a_lost_machine(tmp_path, whole):
    """The lost one is disconnected first, so that its connections are not closed."""
    steps = 1500
    run = write_saving_recipe(tmp_path, steps)
    with machines(3, tmp_path) as (first, second, third):
        lasting, lost = start_agent(first, "2+1"), start_agent(second, "2+1")
        await_line(run.metrics_path, '"step": 20,', lasting, 240)
        with (tmp_path / "spare.log").open("w") as log:
            spare = start_agent(third, "2+1", stdout=log)
        await_line(tmp_path / "spare.log", "this machine is a spare", lasting, 240)
        await_line(run.metrics_path, '"step": 60,', lasting, 240)
        second.cut()
        second.kill()
        await_count(run, "recovered", 1, lasting, seconds=240)
        finish(lost)
        codes, outputs = finish(lasting, spare, seconds=300)
    assert codes == [0, 0], outputs
    said = outputs[0] + (tmp_path / "spare.log").read_text()
    assert "1 of 2 machines stopped responding: node-2" in outputs[0]
    assert "machine node-3 (" in outputs[0] and "a spare, takes the place of another one" in outputs[0]
    assert "this machine was a spare, and now takes the place of another one" in said
    assert said.count("plan: ddp on 2 process") == 2, said
    assert_same(train_rows(run), whole(steps))


@pytest.fixture
def etcd(tmp_path):
    """Start an etcd on a machine; return the address for `--rendezvous`."""
    servers = []

    def start(machine):
        url = f"http://{machine.address}:2379"
        places = ["--listen-client-urls", url, "--advertise-client-urls", url]
        servers.append(machine.start(["etcd", "--data-dir", str(tmp_path / "etcd"), *places], **PIPES))
        return f"etcd://{machine.address}:2379/tiny"

    yield start
    for server in servers:
        server.kill()
        server.communicate()


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed; run make launchers")
@pytest.mark.parametrize("policy", ["restart", "replace", "continue"])
def test_a_spare_replaces_the_first_machine_where_the_store_is_outside(tmp_path, whole, etcd, policy):
    """It is disconnected before it dies, so that nothing tells the others of its end."""
    steps = 3000
    run = write_saving_recipe(tmp_path, steps, policy)
    with machines(4, tmp_path) as network:
        place = etcd(network[3])
        agents = [start_agent(machine, "2+1", rendezvous=place) for machine in network[:3]]
        await_line(run.metrics_path, '"step": 1,', agents[0], 240)
        role = find_coordinator(network[3], place)
        await_line(run.metrics_path, '"step": 60,', agents[0], 240)
        lost = next(index for index, machine in enumerate(network) if f"{machine.name} (" in role)
        network[lost].cut()
        network[lost].kill()
        lost_at = time.time()
        others = [agent for agent in agents if agent is not agents[lost]]
        await_count(run, "recovered", 1, others[0], seconds=240)
        print("seconds", read_events(run, "recovered")[0]["time"] - lost_at)
        finish(agents[lost])
        codes, outputs = finish(*others, seconds=300)
    assert codes == [0, 0], outputs
    assert f"1 of 2 machines stopped responding: {role}" in "".join(outputs), outputs
    assert [row["number"] for row in read_events(run, "restart")] == [1]
    assert_same(train_rows(run), whole(steps))


SLOW = """
import os, time
from echelon.learn.objectives.causal_lm import CausalLM

class Slow(CausalLM):
    def __init__(self, config):
        pass

    def loss_sum(self, outputs, batch):
        end = time.thread_time() + 0.05
        while os.uname().nodename == "node-2" and time.thread_time() < end:
            pass
        return super().loss_sum(outputs, batch)
"""


def test_a_spare_takes_the_place_of_a_slow_machine(tmp_path, whole):
    """It leaves with a checkpoint, so no step is repeated and nothing has failed."""
    (tmp_path / "slow_parts.py").write_text(SLOW)
    write_recipe(
        tmp_path,
        objective={"name": "slow_parts:Slow"},
        train={"steps": 1500, "log_every": 500},
        optim=GENTLE,
        fault={"on_straggler": "replace"},
    )
    run = RunFolder(tmp_path / "runs" / "tiny")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with machines(3, tmp_path) as (first, second, third):
        lasting, slow = (start_agent(machine, "2+1", env=environment) for machine in (first, second))
        await_line(run.metrics_path, '"step": 1,', lasting, 240)
        spare = start_agent(third, "2+1", env=environment)
        codes, outputs = finish(lasting, slow, spare, seconds=300)
    assert codes == [0, 3, 0], outputs
    assert "this machine is slow; a spare takes its place" in outputs[1] and "is a spare" in outputs[2], outputs
    # On a busy machine others may be slow too; when they are, no spare is left.
    assert "node-2" in [found["host"] for found in read_events(run, "straggler")]
    assert not read_events(run, "failure")
    assert_same(train_rows(run), whole(1500))


def test_a_cut_link_ends_both_sides_and_the_same_command_resumes(tmp_path, whole):
    """Connections are not closed, so both sides must detect the cut link within a bounded time."""
    write_recipe(
        tmp_path,
        train={"steps": 600, "log_every": 500},
        optim=GENTLE,
        checkpoint={"every": 20},
        fault={"hang_seconds": 5},
    )
    run = RunFolder(tmp_path / "runs" / "tiny")
    with machines(2, tmp_path) as network:
        agents = [start_agent(machine, "2") for machine in network]
        await_line(run.metrics_path, '"step": 60,', agents[0], 120)
        network[1].cut()
        codes, outputs = finish(*agents, seconds=120)
        assert codes == [1, 1], outputs
        assert "1 of 2 machines stopped responding: node-2" in outputs[0], outputs[0]
        assert "the coordinator at node-1:29400 is gone or unreachable" in outputs[1]
        network[1].heal()
        codes, outputs = finish(*(start_agent(machine, "2") for machine in network))
    assert codes == [0, 0], outputs
    assert "Resuming from step-" in outputs[0] + outputs[1]
    assert_same(train_rows(run), whole(600))
