"""`train.deterministic`: the settings of a worker, and its message about a non-deterministic operation."""

import json
import subprocess
import sys

import pytest

from echelon.ground.launch_environment import worker_environment
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import LAUNCHER_KEYS, finish, start, write_recipe

pytestmark = pytest.mark.dist

# A rank of a prepared run. Instead of training it prints its settings and runs a forbidden operation.
PROBE = """
import json, os, sys
from pathlib import Path
import torch
import echelon.run.lifecycle.rank_run as conducting
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.worker import RankProcess

def look_around(*arguments):
    flags = [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic]
    print(json.dumps([*flags, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]))
    torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))

conducting.run_training = look_around
print(json.dumps(RankProcess(RunFolder(Path(sys.argv[1]))).run().message))
"""


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_worker_is_deterministic_and_names_a_forbidden_operation(tmp_path, monkeypatch, deterministic):
    monkeypatch.chdir(tmp_path)
    for key in (*LAUNCHER_KEYS, "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(key, raising=False)
    write_recipe(tmp_path, train={"steps": 1, "global_batch_size": 4, "deterministic": deterministic})
    assert finish(start("train", "recipe.json", "--nproc", "1")).code == 0
    run = RunFolder(tmp_path / "runs" / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(run.path)], capture_output=True, text=True, check=True, timeout=60
    )
    found, message = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    if deterministic:
        assert found == [True, True, ":4096:8"]
        assert message.startswith("rank 0: train.deterministic=true, and put_ has no deterministic implementation")
        assert "set train.deterministic=false" in message
    else:
        assert found == [False, False, None] and message == ""


def test_cublas_is_configured_before_a_worker_starts():
    assert worker_environment(2, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in worker_environment(2)
