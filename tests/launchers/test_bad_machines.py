"""Machines with a bad GPU, as network namespaces: named before the rendezvous, and left out where others are there.

A module `pynvml` answers for the driver, differently on each machine.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.cases import needs_machines
from tests.dist.command import read_lines, write_recipe
from tests.namespaces import machines

pytestmark = needs_machines()
DRIVER = """
import os
class NVMLError(Exception): pass
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_NVLINK_MAX_LINKS = 1, 0, 0
nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 64, 32
nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128
class Place: busId = "00000000:3A:00.0"
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetPciInfo(handle): return Place
def nvmlDeviceGetTotalEccErrors(*_): return 7 if os.uname().nodename == os.environ["BAD_NODE"] else 0
def nvmlDeviceGetRemappedRows(handle): return 0, 0, 0, 0
def nvmlDeviceGetRetiredPagesPendingStatus(handle): return 0
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return 0
"""
SAID = "GPU 0 has 7 uncorrectable memory (ECC) errors since its last reset"


def train(network, nodes, bad, *more):
    """Train on all machines; return the exit codes and the outputs."""
    folder = network[0].folder
    write_recipe(folder, train={"steps": 20})
    (folder / "driver").mkdir()
    (folder / "driver" / "pynvml.py").write_text(DRIVER)
    paths = os.pathsep.join([str(folder / "driver"), str(Path(sys.modules["echelon"].__file__).parents[1])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "BAD_NODE": bad}
    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1", "--nodes", nodes, *more]
    command += ["--rendezvous", "node-1:29400"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [machine.start(command, env=environment, **pipes) for machine in network]
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    return [agent.returncode for agent in agents], outputs


@pytest.mark.parametrize("bad", [1, 2])
def test_a_bad_machine_is_left_out_and_the_others_train(tmp_path, bad):
    """Also the machine that holds the rendezvous: it goes on to hold it, and trains nothing."""
    with machines(3, tmp_path) as network:
        codes, outputs = train(network, "2:3", f"node-{bad}")
    assert codes == ([0, 0, 0] if bad == 1 else [0, 1, 0]), outputs
    assert f"machine node-{bad} " in outputs[0] and SAID in outputs[0], outputs[0]
    assert bad == 1 or f"this machine is left out: {SAID}" in outputs[1]
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert [row["step"] for row in read_lines(run.metrics_path) if row["kind"] == "train"] == list(range(1, 21))
    assert "plan: ddp on 2 process" in "".join(outputs)


def test_without_enough_others_the_job_ends_before_it_starts(tmp_path):
    with machines(2, tmp_path) as network:
        codes, outputs = train(network, "2", "node-2")
    assert codes == [1, 1], outputs
    assert "echelon: machine node-2 " in outputs[0] and SAID in outputs[0] and "on_bad_machine=warn" in outputs[0]
    assert not (tmp_path / "runs").exists()


def test_a_bad_machine_may_train_all_the_same(tmp_path):
    with machines(2, tmp_path) as network:
        codes, outputs = train(network, "2", "node-2", "fault.on_bad_machine=warn")
    assert codes == [0, 0], outputs
    assert "machine node-2 " in outputs[0] and SAID in outputs[0]
