"""Fixtures for tests that need a CUDA device: one process with one GPU and NCCL; results of a CPU to compare with.

With `--on-cpu` the cases train on a CPU over gloo. That shows nothing of CUDA, but that the tests themselves run: with
another version of torch, or before somebody pays for a GPU. Tests marked `device` are left out.
"""

import os
import sys

import pytest

from echelon.ground.launch_environment import torch_environment

# What `echelon train` gives to its workers. torch reads the allocator's settings as it is imported: where other tests
# have imported it, they run on a CPU.
if "torch" not in sys.modules:
    os.environ.update(torch_environment(1))

import torch

from echelon.learn.distributed.runtime import stop_runtime, use_deterministic_algorithms
from echelon.run.lifecycle.process_group import start_runtime
from tests.gpu.gpu_training import OFFLOAD, Case
from tests.parity.training import train


def pytest_addoption(parser):
    parser.addoption("--on-cpu", action="store_true", help="train the cases of tests/gpu on a CPU over gloo")


def pytest_collection_modifyitems(config, items):
    """With `--on-cpu`, leave out the tests of kernels, memory and clocks of a GPU."""
    if _is_on_cpu(config):
        config.hook.pytest_deselected(items=[item for item in items if _needs_device(item)])
        items[:] = [item for item in items if not _needs_device(item)]


def _needs_device(item):
    """Offloaded plans do so too: they pin host memory, which the driver of a GPU does."""
    cases = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return item.get_closest_marker("device") or any(
        isinstance(case, Case) and case.row.parallel == OFFLOAD for case in cases
    )


def _is_on_cpu(config):
    return config.getoption("--on-cpu", default=False)  # unknown where tests/gpu is not named on the command line


@pytest.fixture(scope="session", autouse=True)
def gpu(request):
    """Make this process the only rank of an NCCL group, with TF32 disabled."""
    if _is_on_cpu(request.config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    runtime = start_runtime()
    expected = ("cpu", "gloo") if _is_on_cpu(request.config) else ("cuda", "nccl")
    assert (runtime.device.type, runtime.backend) == expected
    yield runtime
    stop_runtime()


@pytest.fixture(scope="session")
def references(workers, text, tmp_path_factory):
    """A function that returns the metrics of a reference row from a CPU process, trained once per session."""
    trained = {}

    def find(row):
        if row not in trained:
            trained[row] = train(workers, row, tmp_path_factory.mktemp("reference"), text)
        return trained[row]

    return find


@pytest.fixture
def deterministic():
    """Runs in this test are equal bit for bit: without it, attention adds up gradients in varying order."""
    use_deterministic_algorithms()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
