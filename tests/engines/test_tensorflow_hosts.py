"""engine=tensorflow on two machines, which are network namespaces: its servers connect over the network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import train_rows, write_recipe
from tests.namespaces import machines
from tests.parity.training import hashes

pytest.importorskip("keras_hub")
pytestmark = needs_machines()

STEPS = 10
TOLERANCE = 1e-4
TRAIN = [sys.executable, "-m", "echelon", "train", "recipe.json"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def test_two_machines(tmp_path: Path) -> None:
    write_recipe(tmp_path, train={"steps": STEPS, "log_every": 1})
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    native = subprocess.run([*TRAIN, "--nproc", "1", "run.name=native"], cwd=tmp_path, env=environment, **PIPES)
    assert native.returncode == 0, native.stdout
    settings = ["engine=tensorflow", "run.name=hosts"]
    place = ["--nproc", "1", "--nodes", "2", "--rendezvous", "node-1:29400"]
    with machines(2, tmp_path) as network:
        started = [each.start([*TRAIN, *place, *settings], env=environment, **PIPES) for each in network]
        outputs = [each.communicate(timeout=600)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], outputs
    assert "2 copies of the model" in outputs[0]
    found, expected = (train_rows(RunFolder(tmp_path / "runs" / name)) for name in ("hosts", "native"))
    assert len(found) == STEPS and hashes(found) == hashes(expected)
    for key in ("loss", "grad_norm"):
        assert max(abs(one[key] - other[key]) for one, other in zip(found, expected, strict=True)) < TOLERANCE
