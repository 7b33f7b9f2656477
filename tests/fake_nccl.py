"""A fake of torch's NCCL for CPUs: gloo underneath, and the ways in which NCCL differs from it.

A lost process is not noticed: an operation with it waits until another thread aborts the communicator. Then the wait
ends without an error, and the result has any numbers.
"""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from echelon.learn.distributed.transport import Communicator, Transport

PLANTED = Transport(torch.device("cpu"), "gloo", has_communicators=True)
CONNECT_SECONDS, LOOK_SECONDS = 60.0, 0.002
ORDER = []
"""What has happened in this process: (event, whether in the main thread)."""


def note(event):
    ORDER.append((event, threading.current_thread() is threading.main_thread()))
    if path := os.environ.get("FAKE_NCCL_LOG"):
        with open(f"{path}-{os.getpid()}", "a") as log:
            log.write(f"{event} {ORDER[-1][1]}\n")


class FakeNccl(dist.ProcessGroupGloo):
    """torch.distributed.ProcessGroupNCCL."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        assert options._timeout > timedelta(0)
        super().__init__(store, rank, size, timedelta(seconds=CONNECT_SECONDS))
        self.aborted = threading.Event()
        note("form")

    def abort(self):
        note("abort")
        self.aborted.set()


class FakeWork:
    """torch's WorkNCCL: a wait with a limit blocks the host, one without only the stream, so it raises nothing."""

    def __init__(self, operate, backend):
        self._backend = backend
        try:
            work = operate()
            self._work = getattr(work, "_work", work)  # that of an operation which was started
        except RuntimeError:
            self._work = None

    def wait(self, timeout=None):
        if not self._ends_well() and timeout is not None:
            if not self._backend.aborted.wait(timeout.total_seconds()):
                raise RuntimeError("Work timed out in blocking wait.")
            note("wait of an aborted operation has ended")
        return True

    def _ends_well(self):
        try:
            while self._work is not None and not self._work.is_completed():
                if self._backend.aborted.wait(LOOK_SECONDS):
                    return False
            return self._work is not None and self._work.wait()
        except RuntimeError:
            return False


def plant(change=setattr):
    """Put the fakes in the place of torch's classes, in this process. `change` sets an attribute."""
    run, start = Communicator.run, Communicator.start
    if dist.__dict__.get("ProcessGroupNCCL") is FakeNccl:
        return

    def run_fake(self, operate):
        run(self, lambda: FakeWork(operate, self._backend))
        note("device is synchronized")

    def start_fake(self, operate):
        start(self, lambda: FakeWork(operate, self._backend))

    change(dist, "ProcessGroupNCCL", FakeNccl)
    change(Communicator, "run", run_fake)
    change(Communicator, "start", start_fake)
