"""The driver of a Ray job without Ray: which machines it takes, and its part on each: output, exit code and end."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from echelon.launch.ray import driver
from echelon.launch.ray.driver import JobPlacement, Order, RayMachine, Seat
from echelon.launch.ray.submission import render_files
from echelon.launch.records import make_job
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import DEMO
from tests.waiting import wait_until

# A fake Python in place of echelon's agent.
TRAINING = """#!/bin/bash
echo "arguments: $*; threads: $OMP_NUM_THREADS"
trap 'echo saved; exit 3' TERM
echo $$ > training.pid
while [ ! -e finish ]; do sleep 0.05; done
exit $(cat finish)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A job's folder, which is the shared working directory too, with a fake training program."""
    program = tmp_path / "training"
    program.write_text(TRAINING)
    program.chmod(0o755)
    text = DEMO + f"launch: {{to: ray, nodes: 2, nproc_per_node: 1, python: {program}}}\nfault: {{notice_seconds: 1}}\n"
    recipe, _ = parse_recipe(text, "recipe.yaml", [])
    for name, content in render_files(make_job(recipe, tmp_path, "demo-20300102-030405")).items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "16")  # as Ray sets it
    return tmp_path


def finish(machine, lines):
    """Poll until the agent has ended; returns its exit code."""
    until = time.monotonic() + 20
    while True:
        new, code = machine.poll()
        lines += new
        if code is not None:
            return code
        assert time.monotonic() < until, lines


def await_file(path):
    wait_until(lambda: path.exists() and path.read_text(), 20)


def test_output_and_exit_code_arrive(folder):
    machine, lines = RayMachine(), []
    machine.start("2", "10.0.0.1:2000")
    await_file(folder / "training.pid")
    (folder / "finish").write_text("2")
    assert finish(machine, lines) == 2
    recipe = f"{folder}/recipe.yaml"
    words = f"-m echelon train {recipe} --nproc 1 --nodes 2 --rendezvous 10.0.0.1:2000"
    assert lines == [f"arguments: {words}; threads: "]


def test_a_stop_lets_the_agent_save(folder):
    machine, lines = RayMachine(), []
    machine.start("2", "10.0.0.1:2000")
    await_file(folder / "training.pid")
    machine.stop()
    assert finish(machine, lines) == 3
    assert lines[-1] == "saved"


def test_the_agent_ends_with_the_process_that_started_it(folder):
    code = "from echelon.launch.ray.driver import RayMachine as M; import time; M().start('1', 'a:1'); time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=folder, start_new_session=True)
    await_file(folder / "training.pid")
    agent = psutil.Process(int((folder / "training.pid").read_text()))
    group = [process for process in psutil.process_iter() if os.getpgid(process.pid) == agent.pid]
    assert len(group) > 1  # with the guard
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    _, alive = psutil.wait_procs(group, timeout=20)
    assert not alive


def test_the_state_of_a_lost_node_is_left_out():
    """What `print_worker_logs` of Ray prints for a raylet that has ended: one message of many lines."""
    stream = io.StringIO()
    line = "    [2026-09-01 10:00:00,1 I 7 7] (raylet) node_manager.cc:525: [state-dump] NodeManager:\n"
    with redirect_stdout(driver.Brief(stream)):
        print(f"(raylet) Raylet is terminated. Last lines of its log:\n{50 * line}    the last words\n")
        driver.say("node-2 is lost")
    assert stream.getvalue() == (
        "(raylet) Raylet is terminated. Last lines of its log:\n    the last words\n\nray: node-2 is lost\n"
    )


def test_a_folder_that_the_machine_does_not_have_is_named(folder):
    script = folder / "agent.sh"
    script.write_text(script.read_text().replace(str(folder), "/not/shared"))
    machine, lines = RayMachine(), []
    machine.start("2", "10.0.0.1:2000")
    assert finish(machine, lines) == 2
    assert lines[0].startswith("echelon: /not/shared is no folder on ")
    assert not Path("/not/shared").exists()


@dataclass(eq=False)
class Group:
    """A placement group: the machine of each bundle, which the test says; none while Ray still looks for it."""

    nodes: list = field(default_factory=lambda: [None])
    avoids: str = ""
    released: bool = False


@pytest.fixture
def asked(monkeypatch):
    """The groups that the driver has asked for."""
    groups = []

    def reserve(bundles, labels):
        groups.append(Group(avoids=labels["ray.io/node-id"]))
        return groups[-1]

    monkeypatch.setattr(driver, "_reserve", reserve)
    monkeypatch.setattr(driver, "_is_created", lambda group: None not in group.nodes)
    monkeypatch.setattr(driver, "_find_node", lambda seat: seat.group.nodes[seat.index])
    monkeypatch.setattr(driver, "_release", lambda group: setattr(group, "released", True))
    monkeypatch.setattr(driver, "_MORE_SECONDS", 0)
    return groups


@pytest.fixture
def crew(asked):
    """A job on `2:3` machines: a and b of the first group, and c."""
    first, further = Group(["a", "b"]), Group(["c"])
    crew = JobPlacement(Order(2, 3, {"CPU": 1}, {}, wait_seconds=1, max_restarts=3), first)
    crew.seats = [Seat(first, 0, node="a"), Seat(first, 1, node="b"), Seat(further, 0, node="c")]
    return crew


def lose(crew, node):
    [seat] = [seat for seat in crew.seats if seat.node == node]
    seat.lost = True


def find(crew):
    found = crew.find_more()
    crew.seats += found
    return [seat.node for seat in found]


def test_a_lost_one_of_the_fewest_is_replaced_where_ray_moves_its_bundle(crew, asked):
    lose(crew, "b")
    crew.group.nodes[1] = None
    assert find(crew) == [] and asked == []
    crew.group.nodes[1] = "d"
    assert find(crew) == ["d"] and asked == []


def test_a_bundle_on_a_machine_with_an_agent_stays_empty_and_another_machine_is_asked_for(crew, asked):
    lose(crew, "b")
    crew.group.nodes[1] = "c"
    assert find(crew) == []
    assert [group.avoids for group in asked] == ["!in(a,c)"]
    asked[0].nodes = ["e"]
    assert find(crew) == ["e"] and find(crew) == [] and len(asked) == 1
    lose(crew, "c")  # with its agent gone, the bundle there may be used
    assert find(crew) == ["c"]
    assert sorted(seat.node for seat in crew.seats) == ["a", "c", "e"]


def test_a_further_machine_that_got_an_agent_meanwhile_is_given_back(crew, asked):
    lose(crew, "c")
    assert find(crew) == [] and [group.avoids for group in asked] == ["!in(a,b)"]
    lose(crew, "b")
    crew.group.nodes[1] = "d"
    assert find(crew) == ["d"]
    asked[0].nodes = ["d"]
    assert find(crew) == [] and asked[0].released
    assert find(crew) == [] and asked[1].avoids == "!in(a,d)"


def test_machines_with_equal_host_names_have_their_addresses(crew):
    def seat(host, address, node):
        return driver.Seat(None, 0, host=host, address=address, node=node)

    crew.seats = [seat("a", "10.0.0.1", "1f"), seat("vm", "10.0.0.2", "2f"), seat("vm", "10.0.0.3", "3f")]
    assert [crew.name(each) for each in crew.seats] == ["a", "vm (10.0.0.2)", "vm (10.0.0.3)"]
    crew.seats = [seat("vm", "10.0.0.1", f"{n}abcdefghij") for n in range(2)] + [driver.Seat(None, 0)]
    assert [crew.name(each) for each in crew.seats] == ["vm (0abcdefg)", "vm (1abcdefg)", "a machine"]


def test_a_restart_has_one_agent_on_each_machine(crew):
    further = crew.seats[2].group
    lose(crew, "b")
    crew.group.nodes[1] = "c"
    assert crew.gather([])
    assert [(seat.group, seat.index) for seat in crew.seats] == [(crew.group, 0), (crew.group, 1)]
    assert further.released
