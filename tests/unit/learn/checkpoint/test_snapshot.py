"""Snapshots in the memory of the ranks: which one is whole after losses, and that every rank gets its part again."""

import pytest
import torch
import torch.distributed as dist

from echelon.learn.checkpoint.snapshot import PeerMemory, SnapshotsByStep

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
