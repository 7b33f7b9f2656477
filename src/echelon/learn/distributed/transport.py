"""How processes send that live on when one is lost: over gloo, and what is on GPUs over NCCL.

gloo ends its waits when a process is lost. NCCL waits on. Another thread has to abort its communicator, and then an
operation ends as if it were done, with any numbers. So gloo's connections are closed before a communicator is aborted:
processes agree over gloo alone, and nothing can be agreed on once a result may be wrong.

The part for NCCL is tested with a fake in its place: no machine with two GPUs has run it yet.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from echelon.ground.variables import NCCL_LIMITS, Place, set_variables
from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS, choose_device
from echelon.learn.distributed.torch_internals import add_backend, close_connections, find_backends

_GPU = torch.device("cuda")
_ABORTED = "NCCL communicator was aborted: a process of this group is lost"


@dataclass(frozen=True)
class Transport:
    """What a process computes on and sends over.

    Attributes:
        backend: torch's name for that of the groups inside a replica.
        has_communicators: whether sums between replicas need a `Communicator`.
    """

    device: torch.device
    backend: str = "gloo"
    has_communicators: bool = False


ON_CPU = Transport(torch.device("cpu"))


def choose_transport(place: Place, sees_own_gpu: bool) -> Transport:
    """That of this process: its own GPU, or else the CPU. Raises LaunchError as `choose_device` does."""
    device = choose_device(place, sees_own_gpu)
    if device.type == "cpu":
        return ON_CPU
    set_variables(NCCL_LIMITS)
    return Transport(device, "cpu:gloo,cuda:nccl", True)


@dataclass
class Communicator:
    """The part of a process group that sends tensors of the GPU: one communicator of NCCL.

    Every call has a limit: connecting and aborting that of NCCL_LIMITS, waiting for operations COLLECTIVE_SECONDS.

    Attributes:
        store: where the ranks find each other.
    """

    device: torch.device
    store: Store
    _backend: "dist.ProcessGroupNCCL | None" = None
    _last: dist.Work | None = None
    _is_ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Connect the ranks of a group, which are connected over gloo. Collective. Raises RuntimeError if one is lost.

        NCCL connects at the first operation, so one is run while all ranks are here.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        self._backend = dist.ProcessGroupNCCL(PrefixStore("gpus", self.store), group.rank(), group.size(), options)
        add_backend(group, self.device, self._backend)
        self.run(lambda: group.allreduce([torch.zeros(1, device=self.device)], dist.AllreduceOptions()))

    def run(self, operate: Callable[[], dist.Work]) -> None:
        """Run an operation until the device has done it. Raises RuntimeError if it has failed, or may have."""
        self._check()
        operate().wait(timedelta(seconds=COLLECTIVE_SECONDS))
        self._check()

    def start(self, operate: Callable[[], dist.Work]) -> None:
        """Begin an operation for which the stream of the device waits, not the host. Raises as `finish` does."""
        self._check()
        self._last = operate()
        self._last.wait()

    def finish(self) -> None:
        """Wait until the device has done what was started, of which the last is last. Raises as `run` does."""
        last, self._last = self._last, None
        if last is not None:
            self.run(lambda: last)

    def _check(self) -> None:
        if self._is_ended:
            raise dist.DistNetworkError(_ABORTED)

    def end(self) -> None:
        """End all waits in this communicator, here alone. Not collective. From any thread."""
        self._is_ended = True  # before the abort, which ends a wait without an error
        with self._lock:
            if self._backend is not None:
                self._backend.abort()
            self._backend = None


def end_waits(groups: Sequence[dist.ProcessGroup]) -> None:
    """End all waits in groups that torch has formed, here and, over gloo, in the other processes. Not collective."""
    for group in groups:
        close_connections(group)
    backends = [backend for group in groups for backend in find_backends(group)]
    aborts = [backend.abort for backend in backends if backend.name() == "nccl"]
    if aborts:  # all at once: a kernel of one may wait for that of another
        with ThreadPoolExecutor(len(aborts)) as pool:
            list(pool.map(lambda abort: abort(), aborts))
