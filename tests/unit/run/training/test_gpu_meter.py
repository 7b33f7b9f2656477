"""The load of a GPU, read through torch from a stand-in for NVML's Python package: no GPU is needed."""

import os
import subprocess
import sys

import pytest
import torch

from echelon.run.training.meters import GpuMeter

# Device 0 of the process is the second GPU of the machine. A reading that fails ends the meter.
NVML = """
class NVMLError(Exception): ...
class NVMLError_DriverNotLoaded(NVMLError): ...
class Rates: ...

LOADS = [(20, 100_000, 1980), (40, 200_000, 1900), (90, 300_000, 1310)]  # percent, milliwatts, MHz

def nvmlInit(): ...

def nvmlDeviceGetHandleByIndex(index):
    assert index == 1
    return "second"

def nvmlDeviceGetUtilizationRates(handle):
    if handle != "second" or not LOADS:
        raise NVMLError("not supported")
    rates = Rates()
    rates.gpu = LOADS[0][0]
    return rates

def nvmlDeviceGetPowerUsage(handle):
    return LOADS[0][1]

def nvmlDeviceGetClockInfo(handle, kind):
    return LOADS.pop(0)[2] if kind == 1 else 0  # NVML_CLOCK_SM
"""
PROGRAM = """
import threading, torch
from echelon.run.training.meters import GpuMeter

def wait():
    for thread in threading.enumerate():
        if thread.name == "gpu meter":
            thread.join(60)

meter = GpuMeter(torch.device("cuda", 0), period_seconds=0.01)
print(meter.take())
meter.on_start(0)
wait()
print(tuple(meter.take()), tuple(meter.take()))
meter.on_end()
print(threading.active_count(), torch.cuda.is_initialized())
"""


def run(program, path, **more):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path]), "CUDA_VISIBLE_DEVICES": "1", **more}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_the_mean_since_the_last_call_is_reported_and_then_the_latest(tmp_path):
    (tmp_path / "pynvml.py").write_text(NVML)
    assert run(PROGRAM, tmp_path) == ["None", "(0.5, 200.0, 1730.0) (0.5, 200.0, 1730.0)", "1 False"]


@pytest.mark.parametrize("module", ["raise ImportError", NVML.replace('!= "second"', '== "second"')])
def test_a_gpu_that_does_not_tell_its_load_has_none(tmp_path, module):
    (tmp_path / "pynvml.py").write_text(module)
    program = PROGRAM.replace("tuple(meter.take()), tuple(meter.take())", "meter.take()")
    assert run(program, tmp_path) == ["None", "None", "1 False"]


def test_no_thread_runs_without_a_gpu():
    meter = GpuMeter(torch.device("cpu"))
    meter.on_start(0)
    assert meter.take() is None
    meter.on_end()
