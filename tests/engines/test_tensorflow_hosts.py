"""engine=tensorflow on two machines, which are network namespaces: its servers connect over the network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import read_lines, write_recipe
from tests.namespaces import machines, namespaces_allowed
from tests.parity.training import hashes

pytest.importorskip("keras_hub")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(namespaces_allowed() is not None, reason=str(namespaces_allowed())),
]

STEPS = 10
TOLERANCE = 1e-4
TRAIN = [sys.executable, "-m", "echelon", "train", "recipe.json"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def rows(folder: Path, name: str) -> list[dict]:
    lines = read_lines(RunFolder(folder / "runs" / name).metrics_path)
    return [each for each in lines if each["kind"] == "train"]


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
    found, expected = rows(tmp_path, "hosts"), rows(tmp_path, "native")
    assert len(found) == STEPS and hashes(found) == hashes(expected)
    for key in ("loss", "grad_norm"):
        assert max(abs(one[key] - other[key]) for one, other in zip(found, expected, strict=True)) < TOLERANCE
