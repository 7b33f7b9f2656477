"""The bytes that a rank sends, counted where torch dispatches collectives, are those worked out by hand."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from echelon.learn.distributed.traffic import CollectiveKind, count_traffic

pytestmark = pytest.mark.dist

COUNT = 3 * 2**10
SIZE = 4 * COUNT


def call_each(rank, world_size):
    """What each collective adds, and the bytes by route; the parts of the uneven exchange are 1 and 5 thirds."""
    meter = count_traffic()
    full, part, world = torch.ones(COUNT), torch.ones(COUNT // world_size), dist.group.WORLD
    uneven = [COUNT // 6, 5 * COUNT // 6] if rank == 0 else [5 * COUNT // 6, COUNT // 6]
    received = [COUNT // 6, 5 * COUNT // 6] if rank == 0 else [5 * COUNT // 6, COUNT // 6]

    def in_a_thread():
        thread = threading.Thread(target=dist.all_reduce, args=(full,))
        thread.start()
        thread.join()

    def without_gradients():
        with torch.inference_mode():
            dist.all_reduce(torch.ones(COUNT))

    calls = {
        "all_reduce": lambda: dist.all_reduce(full),
        "without gradients": without_gradients,
        "in a thread": in_a_thread,
        "functional": lambda: functional.all_reduce(full, "sum", world) + 1,
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "all_gather of lists": lambda: dist.all_gather(list(torch.ones(world_size, COUNT // world_size)), part),
        "functional gather": lambda: functional.all_gather_tensor(part, 0, world) + 1,
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(full, "sum", 0, world) + 1,
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(COUNT), full),
        "uneven": lambda: dist.all_to_all_single(torch.empty(COUNT), full, received, uneven),
        "broadcast": lambda: dist.broadcast(full, 0),
        "send": lambda: dist.send(full, 1) if rank == 0 else dist.recv(full, 0),
        "barrier": dist.barrier,
    }
    dist.barrier()
    meter.take()
    before, sent = meter.by_route(), {}
    for name, call in calls.items():
        call()
        sent[name] = meter.take()
    after = meter.by_route()
    return sent, {route: after[route] - before.get(route, 0) for route in after}


def test_every_collective_counts_what_a_ring_sends(workers):
    """Of n bytes over two ranks: an all-reduce sends n from each, a gather, a scatter or an exchange n / 2."""
    for rank, (sent, routes) in enumerate(workers.run(call_each, 2)):
        whole = ("all_reduce", "without gradients", "in a thread", "functional")
        half = ("all_gather", "all_gather of lists", "functional gather", "reduce_scatter")
        half += ("functional reduce_scatter", "all_to_all", "broadcast")
        assert sent == {
            **dict.fromkeys(whole, SIZE),
            **dict.fromkeys(half, SIZE / 2),
            "uneven": pytest.approx(5 / 6 * SIZE),
            "send": SIZE if rank == 0 else 0,
            "barrier": 0,
        }
        assert routes[CollectiveKind("everyone", "all_reduce")] == 4 * SIZE
        assert routes[CollectiveKind("everyone", "all_gather")] == 1.5 * SIZE
