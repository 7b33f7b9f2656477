"""horovodrun on two machines, which are network namespaces with a real sshd, trains what native trains."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import LAUNCHER_KEYS, train_rows, write_recipe
from tests.launchers.secure_shell import serve_ssh, ssh_missing
from tests.namespaces import machines
from tests.parity.training import hashes

pytest.importorskip("horovod")
pytestmark = needs_machines(ssh_missing())

TOLERANCE = 1e-5
TRAIN = [sys.executable, "-m", "echelon", "train", "recipe.json"]
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def test_horovodrun_on_two_machines(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    environment["OMP_NUM_THREADS"] = "1"
    native = subprocess.run([*TRAIN, "--nproc", "2", "run.name=native"], cwd=tmp_path, env=environment, **PIPES)
    assert native.returncode == 0, native.stdout
    with machines(2, tmp_path) as network:
        options = shlex.join(serve_ssh(network, tmp_path / "keys"))
        wrapper = tmp_path / "bin" / "ssh"  # horovodrun calls `ssh`, and takes no options for it
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh {options} "$@"\n')
        wrapper.chmod(0o755)
        places = [str(wrapper.parent), str(Path(sys.executable).parent), environment["PATH"]]
        start = ["horovodrun", "--gloo", "--network-interfaces", "eth0", "-np", "2", "-H", "node-1:1,node-2:1"]
        settings = ["run.name=hosts", "engine=horovod", "parallel=ddp"]
        job = network[0].start(
            ["env", f"PATH={os.pathsep.join(places)}", *start, *TRAIN, *settings], env=environment, **PIPES
        )
        output = job.communicate(timeout=400)[0]
    assert job.returncode == 0, output
    found, expected = (train_rows(RunFolder(tmp_path / "runs" / name)) for name in ("hosts", "native"))
    assert [each["step"] for each in found] == [1, 2, 3, 4, 5, 6] and hashes(found) == hashes(expected)
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(found, expected, strict=True)) < TOLERANCE
