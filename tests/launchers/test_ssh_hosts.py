"""Machines with a real sshd: jobs launched on them, and `echelon doctor` between them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import await_line, read_lines, write_recipe
from tests.launchers.secure_shell import serve_ssh, ssh_missing
from tests.namespaces import machines

pytestmark = needs_machines(ssh_missing())

SOURCE = Path(__file__).parents[2] / "src"


def keys(options):
    """The recipe keys with which these machines find a Python with echelon."""
    return [
        f"launch.torchrun.ssh_options={json.dumps(options)}",
        f"launch.python={sys.executable}",
        f"launch.env={json.dumps({'PYTHONPATH': str(SOURCE), 'OMP_NUM_THREADS': '1'})}",
    ]


def run(machine, *arguments, seconds=180):
    """Run an echelon command on a machine; return its exit code, stdout and stderr."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = machine.start(
        [sys.executable, "-m", "echelon", *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes
    )
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def test_a_job_survives_the_launch_command_and_can_be_cancelled_and_resumed(tmp_path):
    write_recipe(tmp_path, train={"steps": 600, "log_every": 500}, launch={"nproc_per_node": 1})
    folder = RunFolder(tmp_path / "runs" / "tiny")
    with machines(3, tmp_path) as (first, second, desk):
        options = serve_ssh((first, second), tmp_path / "keys")
        words = ["recipe.json", "--to", "torchrun", "--hosts", "node-1,node-2", *keys(options)]
        code, out, err = run(desk, "launch", *words)
        assert code == 0, err
        [job] = [path.name for path in (tmp_path / "jobs").iterdir()]
        assert f"launched {job}" in out
        agent = subprocess.Popen(["sleep", "150"])  # the job's processes are not children of this test
        await_line(folder.metrics_path, '"step": 20,', agent, 120)
        code, out, _ = run(desk, "status", job)
        assert "running  node-1: runs; node-2: runs  step " in out
        assert run(desk, "cancel", job)[0] == 0
        state = await_end(desk, job)
        assert "stopped  node-1: exit code 3; node-2: exit code 3" in state
        stopped_at = folder.newest_step()
        time.sleep(1)  # a job's name contains the time in seconds
        code, out, err = run(desk, "launch", *words, "--follow", "train.steps=700")
        agent.kill()
        agent.wait()
    assert code == 0, out + err
    assert f"| Resuming from step-{stopped_at:08d}." in out
    assert [row["step"] for row in read_lines(folder.metrics_path) if row["kind"] == "train"] == list(range(1, 701))


def await_end(desk, job):
    deadline = time.monotonic() + 60
    while "running" in (state := run(desk, "status", job)[1]):
        assert time.monotonic() < deadline, state
        time.sleep(0.5)
    return state


def test_doctor_names_the_one_bad_pair(tmp_path):
    with machines(4, tmp_path) as network:
        options = serve_ssh(network, tmp_path / "keys")
        words = ["doctor", "--hosts", ",".join(machine.name for machine in network), *keys(options)]
        code, out, err = run(network[0], *words)
        assert code == 0, out + err
        assert "ok       ports        29400 and others are open both ways between every pair" in out
        assert "ok       together " in out
        network[1].cut_from(network[3])
        started = time.monotonic()
        code, out, err = run(network[0], *words)
        assert code == 1 and time.monotonic() - started < 90
        assert (
            "problem  ports        node-2 and node-4 cannot connect: no answer in 3 s; check the network path between"
            in out
        )
        assert out.count("problem") == 1, out
        network[2].cut()
        code, out, err = run(network[0], *words, "--json")
        told = json.loads(out)
        assert code == 1 and not told["is_well"]
        bad = [each["words"] for each in told["findings"] if each["remedy"]]
        assert len(bad) == 2 and bad[0].startswith("node-3 does not answer: ssh: connect to host node-3"), bad
        assert bad[1].startswith("node-2 and node-4 cannot connect")


def test_doctor_names_a_slow_host(tmp_path):
    with machines(3, tmp_path) as network:
        options = serve_ssh(network, tmp_path / "keys")
        network[2].slow(8)
        code, out, err = run(network[0], "doctor", "--hosts", "node-1,node-2,node-3", *keys(options))
    assert code == 1, out + err
    assert "problem  pairs        node-3 is slow with all others: " in out


@pytest.mark.parametrize(
    ("nodes", "faults"),
    [("2", ["a rank killed", "a machine lost"]), ("2:3", ["the first machine lost"]), ("2+1", ["a link cut for 30 s"])],
)
def test_a_drill_loses_machines_and_links(tmp_path, nodes, faults):
    write_recipe(tmp_path)
    with machines(2 if nodes == "2" else 3, tmp_path) as network:
        options = serve_ssh(network, tmp_path / "keys")
        hosts = ",".join(machine.name for machine in network)
        words = ["drill", "recipe.json", "--hosts", hosts, "--nproc", "1", "--links", "--json", *keys(options)]
        only = [word for fault in faults for word in ("--only", fault)]
        code, out, err = run(network[0], *words, f"launch.nodes={nodes!r}", *only, seconds=900)
    findings = [json.loads(line) for line in out.splitlines()]
    assert code == 0, out + err
    assert [row["fault"] for row in findings] == faults and all(row["identical"] for row in findings), findings
    # A job is started again that loses one of a fixed number of machines, or the one with the agents' store.
    assert [row["starts"] for row in findings] == {"2": [1, 2], "2:3": [2]}.get(nodes, [1]), findings
    assert not (tmp_path / "runs" / "tiny-drill").exists()
