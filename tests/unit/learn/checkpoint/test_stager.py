"""The buffers of a save on a GPU are allocated before the first save, which then only copies."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import staging

from echelon.learn.checkpoint.store import CheckpointStore, Stager


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


@pytest.fixture
def store(tmp_path):
    """A store of one process, and no GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = CheckpointStore(tmp_path, keep_last=1, asynchronous=True)
    yield store
    store.close()
    dist.destroy_process_group()


def test_the_rehearsal_of_a_store_allocates_for_its_first_save(store, allocations):
    store.rehearse(build_tensors(0.0))
    deadline = time.monotonic() + 30
    while not allocations.threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [thread is threading.main_thread() for thread in allocations.threads] == [False]


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
