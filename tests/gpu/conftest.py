"""Fixtures for tests that need a CUDA device: one process with one GPU and NCCL; results of a CPU to compare with."""

import os
import sys

import pytest

from echelon.ground.launch_environment import torch_environment

# What `echelon train` gives to its workers. torch reads the allocator's settings as it is imported: where other tests
# have imported it, they run on a CPU.
if "torch" not in sys.modules:
    os.environ.update(torch_environment(1))

import torch

from echelon.learn.distributed.runtime import stop_runtime
from echelon.run.lifecycle.process_group import start_runtime
from tests.parity.training import train


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """Make this process the only rank of an NCCL group, with TF32 disabled."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    runtime = start_runtime()
    assert (runtime.device.type, runtime.backend) == ("cuda", "nccl")
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
