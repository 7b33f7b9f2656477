"""The buffers of a save on a GPU are allocated before the first save, which then only copies."""

import threading

import pytest
import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import staging

from echelon.learn.checkpoint.stager import Stager


class Allocations:
    """torch's allocation of pinned buffers, in memory that is not pinned; notes the thread of each."""

    def __init__(self, monkeypatch):
        self.threads = []
        self._allocate = staging._create_cpu_state_dict
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for module in (_state_dict_utils, staging):
            monkeypatch.setattr(module, "_create_cpu_state_dict", self)

    def __call__(self, state_dict, pin_memory=False):
        assert pin_memory
        self.threads.append(threading.current_thread())
        return self._allocate(state_dict)


@pytest.fixture
def allocations(monkeypatch):
    return Allocations(monkeypatch)


def build_tensors(value, size=8):
    return {"weight": torch.full((size, 2), value), "step": torch.tensor(value)}


def check(copied, tensors):
    assert copied.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(copied[name], tensor) and copied[name].data_ptr() != tensor.data_ptr()


def test_the_first_save_after_a_rehearsal_allocates_nothing(allocations):
    stager = Stager()
    stager.prepare(build_tensors(0.0))
    for value in (1.0, 2.0):
        tensors = build_tensors(value)
        check(stager.stage(tensors), tensors)
    [thread] = allocations.threads
    assert thread is not threading.main_thread()


def test_other_tensors_than_rehearsed_get_buffers_of_their_own(allocations):
    stager = Stager()
    stager.prepare(build_tensors(0.0))
    tensors = build_tensors(1.0, size=4)
    check(stager.stage(tensors), tensors)
    assert len(allocations.threads) == 2
    check(stager.stage(tensors), tensors)
    assert len(allocations.threads) == 2


def test_an_allocation_that_failed_is_repeated_by_the_next_save(allocations, monkeypatch):
    def fail(state_dict, pin_memory):
        raise RuntimeError("out of host memory")

    stager = Stager()
    with monkeypatch.context() as patched:
        patched.setattr(_state_dict_utils, "_create_cpu_state_dict", fail)
        stager.prepare(build_tensors(0.0))
        with pytest.raises(RuntimeError, match="out of host memory"):
            stager.stage(build_tensors(1.0))
    tensors = build_tensors(1.0)
    check(stager.stage(tensors), tensors)


def test_without_a_gpu_nothing_is_allocated_in_advance(monkeypatch):
    allocated = Allocations(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Stager().prepare(build_tensors(0.0))
    assert allocated.threads == []
