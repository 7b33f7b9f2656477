"""The part of the driver that runs on a machine: its agent's output, exit code and end, without Ray."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import psutil
import pytest

from echelon.launch.ray import driver
from echelon.launch.ray.driver import RayMachine
from echelon.launch.ray.submission import render_files
from echelon.launch.records import make_job
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import DEMO

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
    until = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


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
