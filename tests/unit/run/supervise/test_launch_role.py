"""The role of a command, determined from its environment."""

import os
import subprocess
import sys

import pytest

from echelon.ground.cores import num_cores
from echelon.ground.errors import ConfigError
from echelon.ground.launch_environment import (
    AGENT_PID_VARIABLE,
    find_place,
    is_elastic,
    keep_hub_cache_beside,
    kernel_cache_environment,
    launch_role,
    shares_agent_store,
    worker_environment,
)
from echelon.ground.variables import Place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HOROVODRUN = {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("env", "role"),
    [
        ({}, "local"),
        (TORCHRUN, "worker"),
        ({"RANK": "0"}, "local"),
        (OPEN_MPI, "worker"),
        (HOROVODRUN, "worker"),
        (SLURM, "worker"),
        ({**SLURM, "SLURM_NTASKS": "2"}, "agent"),
        ({**SLURM, "SLURM_NTASKS": "1"}, "local"),
        # The shell of sbatch or salloc is not a step, although SLURM_NTASKS is set.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "local"),
        ({**SLURM, "SLURM_STEP_ID": "batch"}, "local"),
        ({"SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1"]'}, "agent"),
        ({"SM_CURRENT_HOST": "algo-1", **TORCHRUN}, "worker"),
        # torchrun inside a Slurm step: the ranks of torchrun take precedence.
        ({**SLURM, "SLURM_NTASKS": "2", **TORCHRUN}, "worker"),
    ],
)
def test_role(env, role):
    assert launch_role(env) == role


def test_place_of_each_launcher():
    assert find_place(TORCHRUN) == Place(3, 8, 1, 2)
    assert find_place(OPEN_MPI) == Place(5, 6, 1, 2)
    assert find_place(HOROVODRUN) == Place(2, 4, 0, 2)
    # A worker of torchrun in which Horovod has started.
    assert find_place({**HOROVODRUN, **TORCHRUN}) == Place(3, 8, 1, 2)
    assert find_place({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}) == Place(3, 4, 1, 2)
    assert find_place({}) == Place(0, 1, 0, 1)
    assert find_place({"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2, 1, 2)


def test_invalid_variables_of_a_launcher_are_named():
    with pytest.raises(ConfigError, match="RANK=2 is not below WORLD_SIZE=2"):
        find_place({"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="WORLD_SIZE='many'"):
        find_place({"RANK": "2", "WORLD_SIZE": "many"})


def test_kernels_of_triton_stay_on_the_machine_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"triton-of-echelon-{os.getuid()}"
    assert kernel_cache_environment()["TRITON_CACHE_DIR"] == str(folder)
    folder.chmod(0o777)  # others could put their code there
    assert "TRITON_CACHE_DIR" not in kernel_cache_environment()
    folder.chmod(0o700)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    assert "TRITON_CACHE_DIR" not in kernel_cache_environment()


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worker_environment(num_cores() * 2)["OMP_NUM_THREADS"] == "1"
    assert worker_environment(1)["OMP_NUM_THREADS"] == str(num_cores())
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(2)["OMP_NUM_THREADS"] == "7"


TORCH_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_COMPILE_THREADS")


def settings_of_torch(monkeypatch, num_processes, **own):
    """What worker_environment sets of TORCH_VARIABLES, on 96 cores."""
    monkeypatch.setattr("echelon.ground.launch_environment.num_cores", lambda: 96)
    for key in TORCH_VARIABLES:
        monkeypatch.delenv(key, raising=False)
    for key, value in own.items():
        monkeypatch.setenv(key, value)
    return {key: value for key, value in worker_environment(num_processes).items() if key in TORCH_VARIABLES}


def test_workers_get_settings_for_torch(monkeypatch):
    growing, threads = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "TORCHINDUCTOR_COMPILE_THREADS"
    assert settings_of_torch(monkeypatch, 8) == growing | {threads: "12"}
    assert settings_of_torch(monkeypatch, 1) == growing | {threads: "32"}
    assert settings_of_torch(monkeypatch, 200) == growing | {threads: "1"}


def test_settings_of_the_user_for_torch_are_kept(monkeypatch):
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "3"}
    new, old = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert settings_of_torch(monkeypatch, 8, **threads, **new) == threads | new
    # worker variables are added to the environment, which has the old name; torch gives the new one precedence
    assert settings_of_torch(monkeypatch, 8, **threads, **old) == threads


def test_cli_and_launch_import_no_torch():
    modules = (
        "echelon.cli.main, echelon.learn.distributed.runtime, echelon.run.lifecycle.process_group, "
        "echelon.run.supervise.agent, "
        "echelon.ground.launch_environment, echelon.launch.local, echelon.cli.commands.jobs, "
        "echelon.run.lifecycle.session"
    )
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_only_another_torchrun_with_restarts_restarts_processes_itself(monkeypatch):
    monkeypatch.delenv(AGENT_PID_VARIABLE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert not is_elastic()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert is_elastic()
    monkeypatch.setenv(AGENT_PID_VARIABLE, "1")  # under echelon's own agent
    assert not is_elastic()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert shares_agent_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert not shares_agent_store()


def test_a_pod_stores_hub_files_next_to_its_run(monkeypatch, tmp_path):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.setenv(name, "x")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    keep_hub_cache_beside(tmp_path / "runs" / "x")
    assert "HF_HOME" not in os.environ
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HF_HUB_CACHE", "/models")
    keep_hub_cache_beside(tmp_path / "runs" / "x")
    assert "HF_HOME" not in os.environ
    monkeypatch.delenv("HF_HUB_CACHE")
    keep_hub_cache_beside(tmp_path / "runs" / "x")
    assert os.environ["HF_HOME"] == str(tmp_path / "runs" / "huggingface")
