"""Jobs that asked for GPUs and do not see them: refused by the real entry points, with the versions and the fix.

An image's torch is emulated by a package `torch` that is found first, the machine by the files that Linux and NVIDIA's
driver show. The code that is tested is the real one, in processes of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import echelon
from echelon.ground.errors import ConfigError
from echelon.ground.variables import AskedGpus, asked_environment, find_asked_gpus
from echelon.launch.sagemaker import enter
from echelon.launch.source_bundle import build_wheel
from echelon.planner.hardware.gpu_check import check_image_devices, find_compat
from echelon.planner.hardware.job_machines import count_asked_gpus
from echelon.recipe.difference import blocking_differences, diff_recipes
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import RECIPE

SOURCE = str(Path(echelon.__file__).parents[1])
DRIVER = "NVRM version: NVIDIA UNIX {kind}  {version}  Release Build  (dvs-builder@U22-I3)\nGCC version: 12.3\n"
TORCH = """
__version__ = "2.13.0+cu130"
from . import cuda, version
"""
CUDA = """
def is_available(): return {visible} > 0
def device_count(): return {visible}
def init(): raise RuntimeError("Error 802: system not yet initialized. (Triggered internally)")
"""


@pytest.fixture
def image(tmp_path):
    """Write a torch built for CUDA that sees some GPUs, and return the environment of a process that finds it."""

    def build(visible=0, cuda="13.0", **variables):
        place = tmp_path / "image" / "torch"
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text(TORCH)
        (place / "cuda.py").write_text(CUDA.format(visible=visible))
        (place / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = '{cuda}'\nhip = None\n")
        return machine(tmp_path, PYTHONPATH=f"{place.parent}:{SOURCE}", **variables)

    return build


def machine(tmp_path, **variables):
    return {**os.environ, "PYTHONPATH": SOURCE, "ECHELON_SYSTEM_ROOT": str(tmp_path / "machine"), **variables}


def install_driver(tmp_path, version, kind="x86_64 Kernel Module"):
    path = tmp_path / "machine" / "proc" / "driver" / "nvidia" / "version"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(DRIVER.format(kind=kind, version=version))


def install_library(tmp_path):
    """A library of the driver's name that can be loaded, as a container runtime puts it there."""
    folder = tmp_path / "lib"
    folder.mkdir()
    loaded = Path("/proc/self/maps").read_text().split()
    (folder / "libcuda.so.1").symlink_to(next(name for name in loaded if Path(name).name.startswith("libc.so")))
    return str(folder)


def start_entry(base, instance, env, **sections):
    """Run `enter.py` with the staged files of a job for this instance type; return its exit code and failure."""
    channel = base / "input" / "data" / "echelon"
    channel.mkdir(parents=True, exist_ok=True)
    (channel / "echelon.zip").write_bytes(build_wheel()[1])
    # pip would fail, and nothing be downloaded: the check comes first.
    (channel / "requirements.txt").write_text("--no-index\nno-such-package-of-echelon>=1\n")
    (channel / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | sections))
    config = base / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    told = {"current_host": "algo-1", "hosts": ["algo-1"], "current_instance_type": instance}
    (config / "resourceconfig.json").write_text(json.dumps(told | {"current_group_name": "homogeneousCluster"}))
    script = f"import sys\nfrom pathlib import Path\nsys.path[:0] = [{str(Path(enter.__file__).parent)!r}]\n"
    script += f"import enter\nsys.exit(enter.main(Path({str(base)!r})))"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, (base / "output" / "failure").read_text(), done.stderr


def test_a_container_without_gpus_is_refused_before_pip(tmp_path, image):
    code, failure, err = start_entry(tmp_path / "ml", "ml.p4d.24xlarge", image())
    assert code == 2, err
    assert failure.startswith("launch.sagemaker.instance_type=ml.p4d.24xlarge: 8 GPUs were asked for on ")
    assert "torch sees none; no NVIDIA driver was found, and torch 2.13.0+cu130 is built for CUDA 13.0." in failure
    assert "Check with nvidia-smi that this machine has a GPU and a working driver" in failure
    assert failure.endswith("To train on the CPU all the same, set train.allow_cpu=true.")
    assert "lacks" not in err


@pytest.mark.skipif("__import__('torch').version.cuda is not None", reason="torch is built for CUDA here")
def test_a_container_with_a_cpu_build_of_torch_is_refused(tmp_path):
    """With the torch of this environment."""
    install_driver(tmp_path, "580.95.05", "Open Kernel Module for x86_64")
    code, failure, _ = start_entry(tmp_path / "ml", "ml.g5.xlarge", machine(tmp_path))
    assert code == 2
    assert "1 GPU was asked for" in failure and "the NVIDIA driver is 580.95.05" in failure
    assert "is built for CPUs only. Install a torch that is built for CUDA" in failure


def test_a_container_with_an_old_driver_is_refused(tmp_path, image):
    install_driver(tmp_path, "535.183.01")
    code, failure, _ = start_entry(tmp_path / "ml", "ml.g5.12xlarge", image())
    assert code == 2
    assert "the NVIDIA driver is 535.183.01, and torch 2.13.0+cu130 is built for CUDA 13.0." in failure
    assert "CUDA 13.0 needs driver 580.65.06 or later: use machines with a newer driver" in failure
    assert "or a torch or image built for CUDA 12" in failure


def test_a_container_with_fewer_gpus_is_refused_unless_it_needs_no_more(tmp_path, image):
    install_driver(tmp_path, "580.95.05")
    env = image(visible=4, CUDA_VISIBLE_DEVICES="0,1,2,3")
    code, failure, _ = start_entry(tmp_path / "ml", "ml.p4d.24xlarge", env, train=RECIPE["train"] | {"allow_cpu": True})
    assert code == 2
    assert "8 GPUs were asked for" in failure and "torch sees 4;" in failure
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 may hide the others" in failure
    assert failure.endswith("ask for fewer, with as many processes (launch.nproc_per_node).")
    code, failure, _ = start_entry(tmp_path / "other", "ml.p4d.24xlarge", env, launch={"nproc_per_node": 4})
    assert code == 1 and failure.startswith("this container lacks no-such-package")


@pytest.mark.parametrize(("instance", "allowed"), [("ml.p4d.24xlarge", True), ("ml.m5.xlarge", False)])
def test_a_container_that_needs_no_gpu_goes_on(tmp_path, image, instance, allowed):
    train = RECIPE["train"] | {"allow_cpu": allowed}
    code, failure, _ = start_entry(tmp_path / "ml", instance, image(), train=train)
    assert code == 1 and failure.startswith("this container lacks no-such-package")


def train(tmp_path, env, *overrides, stderr=subprocess.PIPE):
    """Run `echelon train` of a recipe with a launch section; return its exit code and its stderr, or all its output."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"launch": {"accelerator": "H100"}}))
    (tmp_path / "text.txt").write_text("some text " * 500)
    command = [sys.executable, "-m", "echelon", "train", "recipe.yaml", *overrides]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr or done.stdout


def test_a_launched_command_is_refused_before_the_run_has_a_folder(tmp_path):
    code, err = train(tmp_path, machine(tmp_path, SLURM_GPUS_ON_NODE="4"))
    assert code == 2
    assert err.startswith("echelon: Slurm's allocation (SLURM_GPUS_ON_NODE=4): 4 GPUs were asked for on ")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_each_rank_under_another_launcher_is_refused_with_one_message(tmp_path):
    env = machine(tmp_path, ECHELON_GPUS="2 launch.kubernetes.gpus_per_node=2")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=0"]
    command += ["-m", "echelon", "train", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr.count("2 GPUs were asked for") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.slow
def test_a_gpu_that_is_lost_between_two_starts_ends_the_run(tmp_path):
    """A worker that is started again sees one GPU less than its parent saw; here the parent was allowed to see none."""
    run = tmp_path / "runs" / "demo"
    env = machine(tmp_path, ECHELON_GPUS="2 launch.slurm.gpus_per_node=2")
    code, said = train(tmp_path, env, "train.allow_cpu=true", "--nproc", "1", stderr=subprocess.STDOUT)
    assert code == 0 and "train.allow_cpu=true: training on the CPU; launch.slurm.gpus_per_node=2: 1 GPU" in said
    recipe = (run / "recipe.yaml").read_text().replace("allow_cpu: true", "allow_cpu: false")
    (run / "recipe.yaml").write_text(recipe)
    command = [sys.executable, "-m", "echelon.run.lifecycle.worker", str(run)]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {**place, "ECHELON_AGENT_PID": str(os.getpid())}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((run / ".outcomes" / "rank-0.json").read_text())
    assert (outcome["code"], outcome["final"]) == (2, True)
    assert "2 GPUs were asked for" in outcome["message"]
    code, said = train(tmp_path, machine(tmp_path), "train.steps=12", "--nproc", "1", stderr=subprocess.STDOUT)
    assert code == 0 and "asked for" not in said, said


def explain(env, needed=1):
    words = f"from echelon.planner.hardware.gpu_check import explain_missing\nprint(explain_missing({needed}))"
    done = subprocess.run([sys.executable, "-c", words], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_other_cause_has_its_fix(tmp_path, image):
    assert "Check with nvidia-smi that this machine has a GPU and a working driver" in explain(image())
    install_driver(tmp_path, "580.95.05")
    assert "libcuda.so.1 is not in this container" in explain(image())
    library = install_library(tmp_path)
    hidden = explain(image(LD_LIBRARY_PATH=library, CUDA_VISIBLE_DEVICES="-1"))
    assert hidden.endswith("CUDA_VISIBLE_DEVICES='-1' hides every GPU: remove the variable")
    assert "torch says: Error 802: system not yet initialized" in explain(image(LD_LIBRARY_PATH=library))
    assert "Check with nvidia-smi whether the others have failed" in explain(image(visible=7), 8)
    assert explain(image(visible=8), 8) == "None"
    words = "from echelon.tools.doctor.machine import judge_devices\nprint(*judge_devices(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", words], env=image(), capture_output=True, text=True, timeout=60)
    assert "'this machine has 1 GPU'" in done.stdout and "torch sees none; the NVIDIA driver is 580.95" in done.stdout


@pytest.mark.slow
def test_hosts_are_asked_for_the_gpus_that_they_have(tmp_path, monkeypatch):
    env = machine(tmp_path, ECHELON_GPUS="any launch.to=torchrun")
    for number, (vendor, kind) in enumerate((("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000"))):
        device = tmp_path / "machine" / "sys" / "bus" / "pci" / "devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    code, err = train(tmp_path, env)
    assert code == 2
    assert "launch.to=torchrun, and this machine has 1 NVIDIA GPU: 1 GPU was asked for" in err


def test_compatibility_libraries_come_first_when_the_driver_is_older(tmp_path, image, monkeypatch):
    """The command starts itself again: a process finds its libraries by the environment it was started with."""
    compat = tmp_path / "machine" / "usr" / "local" / "cuda" / "compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.580.65.06").touch()
    env = image(LD_LIBRARY_PATH="/other")
    show = "import atexit, os, sys; atexit.register(lambda: print(os.environ['LD_LIBRARY_PATH']))"
    start = "from echelon.cli.main import main; sys.argv = ['echelon', '--version']; main()"

    def run(version):
        install_driver(tmp_path, version)
        command = [sys.executable, "-c", f"{show}; {start}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1], done.stderr

    path, err = run("535.183.01")
    assert path == f"{compat}:/other"
    assert err == (
        "hardware: NVIDIA driver 535.183.01 is older than CUDA 13.0 needs (580.65.06): using the compatibility "
        f"libraries in {compat}\n"
    )
    assert run("580.95.05") == ("/other", "")
    monkeypatch.setenv("ECHELON_SYSTEM_ROOT", str(tmp_path / "machine"))
    assert find_compat({}) is None  # the torch of this environment needs none


@pytest.mark.parametrize(
    ("image", "gpus", "said"),
    [
        ("1.dkr/pytorch:2.13-cpu-amzn2023-sagemaker", 8, "is an image for CPUs by its name, but ml.x has 8 GPUs"),
        ("1.dkr/team-cpu", 1, "is an image for CPUs by its name, but ml.x has 1 GPU;"),
        ("1.dkr/pytorch:2.13-cu133-amzn2023-sagemaker", 0, "is an image for GPUs by its name, but ml.x has no GPU"),
        ("pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime", 0, "is an image for GPUs"),
        ("1.dkr/pytorch:2.13-cu133-amzn2023-sagemaker", 8, None),
        ("1.dkr/pytorch-training:2.11-cpu-py312", 0, None),
        ("cpu.example.org/echelon:latest", 8, None),
        ("echelon:latest", 0, None),
    ],
)
def test_images_against_machines(image, gpus, said):
    check_image_devices("launch.sagemaker.image", image, "ml.x", gpus, allow_cpu=True)
    if said is None:
        check_image_devices("launch.sagemaker.image", image, "ml.x", gpus, allow_cpu=False)
        return
    with pytest.raises(ConfigError) as refused:
        check_image_devices("launch.sagemaker.image", image, "ml.x", gpus, allow_cpu=False)
    assert str(refused.value).startswith(f"launch.sagemaker.image={image} {said}")


def test_a_run_resumes_with_and_without_the_permission():
    without, allowed = (
        parse_recipe(yaml.safe_dump(RECIPE), "recipe.yaml", [f"train.allow_cpu={value}"])[0] for value in (False, True)
    )
    assert [each.key for each in diff_recipes(without, allowed)] == ["train.allow_cpu"]
    assert blocking_differences(without, allowed) == blocking_differences(allowed, without) == []


def test_what_asks_for_gpus():
    assert find_asked_gpus({}) is None
    for count, by in ((8, "launch.slurm.gpus_per_node=8"), (None, "launch.to=torchrun")):
        assert find_asked_gpus(asked_environment(count, by)) == AskedGpus(count, by)
    assert asked_environment(0, "anything") == {}
    assert find_asked_gpus({"ECHELON_GPUS": "2 a", "SLURM_GPUS_ON_NODE": "4"}) == AskedGpus(2, "a")
    launch = LaunchConfig()
    assert count_asked_gpus(launch, "ml.p5.48xlarge", None) == (8, "launch.sagemaker.instance_type=ml.p5.48xlarge")
    by = "launch.sagemaker.instance_groups, group a (ml.g5.12xlarge)"
    assert count_asked_gpus(launch, "ml.g5.12xlarge", "a") == (4, by)
    assert count_asked_gpus(launch, "ml.p9.48xlarge", None)[0] == 1
    assert [count_asked_gpus(launch, name, None)[0] for name in ("ml.m9.large", "ml.trn1.32xlarge", None)] == [0, 0, 0]
