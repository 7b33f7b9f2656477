"""Jobs that ask for GPUs on machines without any: a real Slurm that grants them, a pod's command, agents of two hosts.

Slurm counts the GPUs of its nodes without looking for them, so it grants what the machine does not have.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from echelon.ground.sockets import find_free_port
from echelon.launch.kubernetes import launcher as kubernetes
from echelon.launch.kubernetes.manifest import RECIPE_PATH
from echelon.launch.records import make_job
from echelon.recipe.load import load_recipe
from tests.dist.command import RECIPE, TEXT, finish, start, write_recipe
from tests.launchers.slurm_cluster import find_obstacle, slurm_cluster

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.skipif("torch.cuda.is_available()", reason="this machine has GPUs"),
]
SOURCE = str(Path(sys.modules["echelon"].__file__).parents[1])


@pytest.fixture(scope="module")
def slurm():
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(f"no Slurm here: {obstacle}")
    with slurm_cluster() as cluster:
        yield cluster


def launch(slurm, folder, *overrides):
    """Launch a job for two machines and wait for its end; return what `echelon status` says, and its output."""
    (folder / "text.txt").write_text(TEXT)
    env = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": SOURCE,
        "ECHELON_RENDEZVOUS": f"127.0.0.1:{find_free_port('127.0.0.1')}",
    }
    settings = {"python": sys.executable, "env": env, "nodes": 2, "nproc_per_node": 1}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "launch": settings}))

    def echelon(*words):
        command = [sys.executable, "-m", "echelon", *words]
        answer = subprocess.run(command, cwd=folder, env=slurm.env, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout + answer.stderr

    name, number = re.search(
        r"launched (\S+) as (\d+);", echelon("launch", "recipe.yaml", "--to", "slurm", *overrides)
    ).groups()
    slurm.await_state(number, "COMPLETED", "FAILED", seconds=180)
    return echelon("status", name), (folder / "jobs" / name / "output.log").read_text()


@pytest.mark.parametrize(
    ("overrides", "by"),
    [
        (["launch.slurm.gpus_per_node=2"], "launch.slurm.gpus_per_node=2: 1 GPU was asked for"),
        (["launch.nproc_per_node=auto", "launch.slurm.gpus_per_node=2"], "launch.slurm.gpus_per_node=2: 2 GPUs were"),
        (
            ["launch.slurm.gpus_per_node=0", "launch.slurm.options={gres: 'gpu:2'}", "launch.nproc_per_node=2"],
            "Slurm's allocation (SLURM_GPUS_ON_NODE=2): 2 GPUs were asked for",
        ),
        (["launch.nodes=1"], "launch.nproc_per_node=1: 1 GPU was asked for"),
    ],
)
def test_slurm_grants_gpus_that_torch_does_not_see(slurm, tmp_path, overrides, by):
    status, output = launch(slurm, tmp_path, *overrides)
    assert "failed" in status and "step" not in status
    assert output.count(f"echelon: {by}") == 1, output
    assert "set train.allow_cpu=true" in output
    assert not (tmp_path / "runs").exists()
    [code] = tmp_path.glob("jobs/*/exit_code")
    assert code.read_text() == "2\n"


def test_slurm_with_permission_trains_on_the_cpu(slurm, tmp_path):
    status, output = launch(slurm, tmp_path, "launch.slurm.gpus_per_node=1", "train.allow_cpu=true")
    assert "done" in status, output
    assert "train.allow_cpu=true: training on the CPU; launch.slurm.gpus_per_node=1: 1 GPU was asked for" in output


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "hyperpod"])
def test_the_command_of_a_pod_is_refused(tmp_path, kind):
    """With the container's command and variables; of HyperPod's launcher, the workers that it would start."""
    (tmp_path / "text.txt").write_text(TEXT)
    settings = {"kind": kind, "image": "local", "gpus_per_node": 2, "volumes": [{"mount": str(tmp_path), "claim": "c"}]}
    job = {"to": "kubernetes", "python": sys.executable, "nproc_per_node": 2, "kubernetes": settings}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "launch": job}))
    recipe, _ = load_recipe(tmp_path / "recipe.yaml")
    texts = kubernetes.KubernetesLauncher().render(make_job(recipe, tmp_path, "tiny-20300102-030405"))
    config_map, body = yaml.safe_load_all(texts["manifest.yaml"])
    (tmp_path / "there.yaml").write_text(config_map["data"]["recipe.yaml"])
    if kind == "pytorchjob":
        container = body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    elif kind == "hyperpod":
        container = body["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    else:
        container = body["spec"]["trainer"]
    command = [word.replace("$$", "$").replace(RECIPE_PATH, "there.yaml") for word in container["command"]]
    if kind == "hyperpod":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command = [*launcher, *command[command.index("-m", 3) :]]
    command = [re.sub(r"tiny-\d+-\d+-\S+:29400", f"127.0.0.1:{find_free_port('127.0.0.1')}", word) for word in command]
    env = {**os.environ, **{each["name"]: each["value"] for each in container["env"]}, "PYTHONPATH": SOURCE}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == (1 if kind == "hyperpod" else 2), done.stderr  # 1: torchrun's own code
    said = "echelon: launch.kubernetes.gpus_per_node=2: 2 GPUs were asked for on "
    assert done.stderr.count(said) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_one_host_without_its_gpus_ends_the_job_on_all(tmp_path):
    write_recipe(tmp_path, train={"steps": 100000})
    place = f"127.0.0.1:{find_free_port('127.0.0.1')}"
    command = ("train", "recipe.json", "--nproc", "1", "--nodes", "2", "--rendezvous", place)
    first = start(*command, cwd=tmp_path)
    time.sleep(1)
    second = start(*command, cwd=tmp_path, ECHELON_GPUS="8 launch.slurm.gpus_per_node=8")
    try:
        endings = [finish(each, 200) for each in (first, second)]
    finally:
        for each in (first, second):
            each.send_signal(signal.SIGKILL)
    assert [each.code for each in endings] == [2, 2], endings
    said = "echelon: launch.slurm.gpus_per_node=8: 1 GPU was asked for on "
    assert sum(each.err.count(said) for each in endings) == 1, endings
