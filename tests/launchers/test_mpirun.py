"""The real mpirun, without torch variables: its ranks connect on one machine and on two."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import LAUNCHER_KEYS, train_rows, write_recipe
from tests.launchers.secure_shell import serve_ssh, ssh_missing
from tests.namespaces import machines, namespaces_allowed

WHY_NO_MPIRUN = None if shutil.which("mpirun") else "no mpirun here; install openmpi-bin"
WHY_NO_MACHINES = WHY_NO_MPIRUN or namespaces_allowed() or ssh_missing()
pytestmark = [pytest.mark.dist, pytest.mark.slow]

SOURCE = Path(__file__).parents[2] / "src"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
TRAIN = [sys.executable, "-m", "echelon", "train", "recipe.json"]
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def environment():
    without = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    return without | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}


@pytest.mark.skipif(WHY_NO_MPIRUN is not None, reason=str(WHY_NO_MPIRUN))
def test_two_ranks_on_one_machine(tmp_path):
    write_recipe(tmp_path)
    command = [*MPIRUN, "-np", "2", *TRAIN]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), timeout=180, check=False, **PIPES)
    assert done.returncode == 0, done.stderr
    assert "plan: ddp on 2 processes" in done.stdout
    assert [row["step"] for row in train_rows(RunFolder(tmp_path / "runs" / "tiny"))] == list(range(1, 7))


@pytest.mark.skipif(WHY_NO_MACHINES is not None, reason=str(WHY_NO_MACHINES))
def test_two_machines_with_rank_zero_away_from_mpirun(tmp_path):
    write_recipe(tmp_path)
    with machines(3, tmp_path) as network:
        ssh = shlex.join(["ssh", *serve_ssh(network, tmp_path / "keys")])

        def run(hosts, *words):
            agent = ["--mca", "plm_rsh_agent", ssh, "-H", hosts, "-np", "2", *words]
            process = network[0].start([*MPIRUN, *agent, *TRAIN], env=environment(), **PIPES)
            out, err = process.communicate(timeout=180)
            return process.returncode, out, err

        code, _, err = run("node-2:1,node-3:1")
        assert code == 2 and err.count("echelon: ") == 1
        assert "echelon: MASTER_ADDR is not set, and rank 0 runs on another machine than mpirun" in err
        assert not (tmp_path / "runs").exists()
        code, out, err = run("node-2:1,node-3:1", "-x", "MASTER_ADDR=node-2")
        assert code == 0, err
        assert "plan: ddp on 2 processes" in out
        shutil.rmtree(tmp_path / "runs")
        code, out, err = run("node-1:1,node-2:1")
        assert code == 0, err
    assert "plan: ddp on 2 processes" in out
    assert [row["step"] for row in train_rows(RunFolder(tmp_path / "runs" / "tiny"))] == list(range(1, 7))
