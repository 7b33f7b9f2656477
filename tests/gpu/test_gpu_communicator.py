"""The communicator of a view on one GPU: it is connected, aborted by another thread, and connected again."""

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from echelon.ground.variables import NCCL_LIMITS
from echelon.learn.distributed.joint_group import JointGroup
from echelon.learn.distributed.transport import Communicator
from tests import fake_nccl

pytestmark = pytest.mark.gpu

SECONDS, CYCLES = 60, 4_000_000_000


def test_a_communicator_is_aborted_by_another_thread_and_connected_again(gpu, monkeypatch):
    for name, value in NCCL_LIMITS.items():
        monkeypatch.setenv(name, value)
    if gpu.device.type == "cpu":
        fake_nccl.plant(partial(monkeypatch.setattr, raising=False))
    store, limit = dist.HashStore(), timedelta(seconds=SECONDS)
    for view in range(3):
        found = dist.PrefixStore(f"view/{view}", store)
        communicator = Communicator(gpu.device, found)
        connect = partial(dist.ProcessGroupGloo, found, 0, 1, limit)
        group = JointGroup(connect, 0, 1, None, "replica", None, communicator)
        values = torch.full((1024,), 3.0, device=gpu.device)
        options = dist.AllreduceOptions()
        group.allreduce([values], options)
        assert torch.equal(values.cpu(), torch.full((1024,), 3.0))
        group.allreduce([torch.ones(1)], options)  # on the host, over gloo
        if gpu.device.type == "cuda":
            torch.cuda._sleep(CYCLES)  # seconds, in which the sum cannot begin
        with group.together():
            for _ in range(2):
                group.allreduce([values], options)
                values.add_(1.0)
            assert gpu.device.type == "cpu" or not torch.cuda.current_stream().query(), "the host goes on"
        assert torch.equal(values.cpu(), torch.full((1024,), 5.0))
        if gpu.device.type == "cuda":
            torch.cuda._sleep(CYCLES)
        ending = threading.Timer(0.1, group.close)
        ending.start()
        with pytest.raises(dist.DistNetworkError, match="communicator was aborted"):
            while True:
                group.allreduce([values], options)
        ending.join(SECONDS)
        assert not ending.is_alive()
