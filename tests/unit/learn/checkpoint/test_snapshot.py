"""Snapshots in the ranks' memory, whole after losses; the buffers of a save on a GPU, allocated before the first."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.checkpoint import store as store_module
from echelon.learn.checkpoint.snapshot import PeerMemory, SnapshotsByStep
from echelon.learn.checkpoint.store import CheckpointStore, Stager, allocate_buffers
from tests.waiting import wait_until

RANKS = 3
ODD = {"a": torch.float32, "b": torch.bfloat16, "c": torch.int64, "d": torch.uint8}


def build_state(rank, step):
    """Tensors whose sizes differ between ranks, among them one of a single number and an empty one."""
    numbers = torch.arange(7 + rank) + 100 * step + rank
    state = {name: numbers.to(dtype) for name, dtype in ODD.items()}
    return state | {"number": torch.tensor(float(step)), "none": torch.empty(0, 4)}


def lose(rank, world_size, lost, ends_early):
    """Snapshots after steps 4 and 8; some ranks lose all that they hold, or the second snapshot does not end."""
    held = SnapshotsByStep()
    memory = PeerMemory(held, 4, 1)
    assert [step for step in range(1, 9) if memory.is_due(step)] == [4, 8] and memory.newest() is None
    for step in (4, 8):
        memory.save(step, build_state(rank, step), {"step": step})
    memory.close()
    assert held.own.keys() == held.other.keys() == held.states.keys() == {8}, "the older one is dropped"
    if ends_early:  # as if a rank had been lost before it knew that the others hold step 8
        held.own[4], held.other[4], held.states[4], held.whole = held.own[8], held.other[8], {"step": 4}, 4
    if rank in lost:
        held = SnapshotsByStep()
    after = PeerMemory(held, 4, 1)
    found = after.newest()
    if found is None:
        after.close()
        return None
    state = after.fetch(found)
    filled = {name: torch.zeros_like(tensor) for name, tensor in build_state(rank, 0).items()}
    after.fill(found.step, filled)
    expected = build_state(rank, 8)
    assert all(torch.equal(filled[name], tensor) for name, tensor in expected.items())
    after.close()
    assert held.own.keys() == held.other.keys() == {found.step}, "every part is held twice again"
    dist.barrier()
    return found.step, state["step"]


@pytest.mark.parametrize("lost", [(0,), (1,), (2,)])
def test_a_lost_rank_gets_its_part_from_the_next_one(workers, lost):
    assert workers.run(lose, RANKS, lost, False) == [(8, 8)] * RANKS


def test_of_two_neighbours_one_part_is_lost(workers):
    assert workers.run(lose, RANKS, (1, 2), False) == [None] * RANKS


def test_a_snapshot_that_did_not_end_is_not_used(workers):
    """Rank 2 is lost, and its part of step 8 is held. What others copied may be of a collective that it left."""
    assert workers.run(lose, RANKS, (2,), True) == [(4, 4)] * RANKS


class Allocations:
    """The allocation of pinned buffers, in memory that is not pinned; notes the thread of each."""

    def __init__(self, monkeypatch):
        self.threads = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(store_module, "allocate_buffers", self)

    def __call__(self, tensors, pinned):
        assert pinned
        self.threads.append(threading.current_thread())
        return allocate_buffers(tensors, pinned=False)


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


class Copies(TorchDispatchMode):
    """Notes the operations that read what a tensor contains."""

    names = ()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if "copy" in operation.name() or "clone" in operation.name():
            self.names += () if result.device.type == "meta" else (operation.name(),)
        return result


def test_buffers_of_sharded_tensors_are_allocated_without_a_copy(store):
    """On a GPU each copy would wait for the stream of the first steps."""
    mesh = dist.init_device_mesh("cpu", (1,))
    tensors = {"weight": distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]), "step": torch.tensor(1.0)}
    with Copies() as copies:
        buffers = allocate_buffers(tensors, pinned=False)
    assert copies.names == ()
    assert (buffers["weight"].placements, buffers["weight"].shape) == (tensors["weight"].placements, (3, 2))
    copied = Stager().stage(tensors)
    assert torch.equal(copied["weight"].to_local(), tensors["weight"].to_local())
    assert copied["weight"].to_local().data_ptr() != tensors["weight"].to_local().data_ptr()


def test_the_rehearsal_of_a_store_allocates_for_its_first_save(store, allocations):
    store.rehearse(build_tensors(0.0))
    wait_until(lambda: allocations.threads)
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
    def fail(tensors, pinned):
        raise RuntimeError("out of host memory")

    stager = Stager()
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "allocate_buffers", fail)
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
