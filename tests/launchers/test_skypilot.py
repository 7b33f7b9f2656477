"""SkyPilot's part emulated: its script on machines that share nothing, a stop, and other machines that go on."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from echelon.launch.records import make_job
from echelon.launch.skypilot import SkyPilotLauncher
from echelon.launch.source_bundle import build_wheel
from echelon.recipe.load import parse_recipe
from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import EXACT, LAUNCHER_KEYS, RECIPE, TEXT, read_lines
from tests.namespaces import machines

pytestmark = needs_machines()

SOURCE = Path(__file__).parents[2] / "src"
STEPS = 400
SECONDS = 600
RUN = Path("echelon/runs/tiny")


def is_agent(process):
    return process.cmdline()[1:4] == ["-m", "echelon", "train"]


def read_logs(folder):
    return "".join(path.read_text() for path in folder.glob("*/log"))


def start(task, network, folder):
    """Start the task on new machines of SkyPilot: the files that it mounts, its variables, its script."""
    addresses = [machine.address for machine in network]
    processes = []
    for rank, machine in enumerate(network):
        home = folder / machine.name
        for target, source in task["file_mounts"].items():
            place = home / target.removeprefix("~/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_KEYS}
        env |= {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), **task["envs"]}
        env |= {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NODE_RANK": str(rank)}
        env |= {"SKYPILOT_NUM_NODES": str(len(network))}
        log = (home / "log").open("w")
        command = ["bash", "-c", task["run"]]
        processes.append(machine.start(command, env=env, cwd=home, stdout=log, stderr=subprocess.STDOUT))
    return processes


def test_a_stopped_task_goes_on_elsewhere_from_its_remote_checkpoint(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    sections = {
        "train": RECIPE["train"] | {"steps": STEPS},
        "checkpoint": {"every": 10, "remote": f"file://{tmp_path}/store"},
        "launch": {"to": "skypilot", "nodes": 2, "nproc_per_node": 1, "python": sys.executable},
    }
    recipe, _ = parse_recipe(yaml.safe_dump(RECIPE | sections), "recipe.yaml", [])
    job = make_job(recipe, tmp_path, "tiny-20300102-030405")
    launcher = SkyPilotLauncher()
    launcher.check(job)
    (tmp_path / job.folder).mkdir(parents=True)
    job.recipe_path.write_text(yaml.safe_dump(RECIPE | sections))
    name, content = build_wheel()
    (tmp_path / job.folder / name).write_bytes(content)
    task = yaml.safe_load(launcher.render(job)["task.yaml"])
    with machines(2, tmp_path) as network:
        pair = network[::-1]  # the head, which gets rank 0, is not the machine with the first address
        processes = start(task, pair, tmp_path / "first")
        run = RunFolder(tmp_path / "first" / pair[0].name / RUN)
        while not run.metrics_path.exists() or len(run.metrics_path.read_text().splitlines()) < 15:
            assert all(process.poll() is None for process in processes), read_logs(tmp_path / "first")
            time.sleep(0.1)
        for process in processes:
            agents = [child for child in psutil.Process(process.pid).children(True) if is_agent(child)]
            agents[0].terminate()
        assert 75 in [process.wait(SECONDS) for process in processes], read_logs(tmp_path / "first")
        assert list(run.checkpoints_dir.glob("step-*/elsewhere.json"))  # each machine has sent its own files
        before = read_lines(run.metrics_path)
        assert before[-1]["step"] < STEPS
        processes = start(task, pair, tmp_path / "second")
        assert [process.wait(SECONDS) for process in processes] == [0, 0], read_logs(tmp_path / "second")
    assert "Resuming from step-" in read_logs(tmp_path / "second")
    after = read_lines(RunFolder(tmp_path / "second" / pair[0].name / RUN).metrics_path)
    rows, kept = ([row for row in found if row["kind"] == "train"] for found in (after, before))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row[key] == old[key] for row, old in zip(rows, kept, strict=False) for key in EXACT)
