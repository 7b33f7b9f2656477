"""The order of calls to NCCL, with fakes in its place: an aborted operation counts as failed, and every wait ends."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from echelon.ground.variables import NCCL_LIMITS, Place
from echelon.learn.distributed import transport
from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS
from echelon.learn.distributed.transport import ON_CPU, Communicator, choose_transport, end_waits

SECONDS = 60


class Backend:
    """A communicator whose operations never complete; an abort ends their waits without an error, as NCCL's does."""

    def __init__(self, name="nccl"):
        self.limits, self.aborted, self.num_aborts, self.waits = [], threading.Event(), 0, threading.Event()
        self.name = lambda: name

    def abort(self):
        self.num_aborts += 1
        self.aborted.set()

    def wait(self, limit=None):
        self.limits.append(limit)
        if limit is None:  # the stream waits, not the host
            return True
        self.waits.set()
        assert self.aborted.wait(SECONDS)
        return True


def communicator(backend):
    return Communicator(torch.device("cpu"), dist.HashStore(), backend)


@pytest.mark.parametrize("count", [1, 3])
def test_an_operation_that_never_completes_ends_by_an_abort_and_counts_as_failed(count):
    """Of several that are started, the host waits for the last one alone."""
    backend, errors, num_run = Backend(), [], []
    group = communicator(backend)

    def operate():
        try:
            for _ in range(count):
                (group.run if count == 1 else group.start)(lambda: num_run.append(1) or backend)
            group.finish()
        except dist.DistNetworkError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=operate)
    waiting.start()
    assert backend.waits.wait(SECONDS)
    group.end()
    waiting.join(SECONDS)
    started = [None] * (count if count > 1 else 0)
    assert not waiting.is_alive() and backend.limits == [*started, timedelta(seconds=COLLECTIVE_SECONDS)]
    assert len(errors) == 1 and "communicator was aborted" in errors[0]
    operate()
    assert len(errors) == 2 and len(num_run) == count, "no operation begins after an abort"
    group.end()
    assert backend.num_aborts == 1


def test_an_abort_that_fails_is_tried_again():
    backend = Backend()
    group = communicator(backend)
    backend.abort = lambda: (_ for _ in ()).throw(RuntimeError("ProcessGroup abort timed out"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            group.end()


def test_connections_of_gloo_are_closed_before_any_communicator_is_aborted(monkeypatch):
    """All aborts run at the same time: each of these waits for the others."""
    order, rendezvous = [], threading.Barrier(2)
    monkeypatch.setattr(transport, "close_connections", lambda group: order.append(f"close {group.number}"))

    def build(number, name):
        backend = Backend(name)
        backend.abort = lambda: (rendezvous.wait(SECONDS), order.append("abort"))
        return SimpleNamespace(number=number, _device_types=["one"], _get_backend=lambda device: backend)

    end_waits([build(0, "nccl"), build(1, "nccl"), build(2, "gloo"), SimpleNamespace(number=3, _device_types=[])])
    assert order == ["close 0", "close 1", "close 2", "close 3", "abort", "abort"]


def test_a_process_with_a_gpu_sends_over_nccl_whose_threads_end_no_process(monkeypatch):
    found, place = {}, Place(1, 2, 1, 2)
    monkeypatch.setattr(transport, "set_variables", found.update)
    monkeypatch.setattr(transport, "choose_device", lambda place, sees_own: torch.device("cuda", place.local_rank))
    chosen = choose_transport(place, False)
    assert (chosen.device, chosen.backend, chosen.has_communicators) == (
        torch.device("cuda", 1),
        "cpu:gloo,cuda:nccl",
        True,
    )
    assert found == NCCL_LIMITS and found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    monkeypatch.setattr(transport, "choose_device", lambda place, sees_own: torch.device("cpu"))
    assert choose_transport(place, False) == ON_CPU
