"""A process that works for this one over a pipe, and can be ended at any moment.

Processes are started with `spawn`: forking a process with threads can hang.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from echelon.ground.stop_request import start_watchdog

_STOPS = (signal.SIGTERM, signal.SIGINT)


class ChildProcess:
    """A process that runs `work(connection, *arguments)`, and this process's end of its pipe.

    Each has a pipe of its own instead of a shared queue: a killed one cannot leave a lock behind. One whose parent is
    gone ends at once.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(os.getpid(), work, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Kill the process. It has no state that could be left incomplete."""
        self.connection.close()
        self._process.kill()
        self._process.join()

    def wait_for_exit(self) -> int | None:
        """Wait for the end of a process that has closed its pipe; returns its exit code."""
        self._process.join()
        return self._process.exitcode


def _run(parent: int, work: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    """Do the work in the new process. The parent handles Ctrl-C."""
    start_watchdog(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # the parent blocked them while starting it
    work(connection, *arguments)


@contextmanager
def stops_held_back() -> Iterator[None]:
    """Delay SIGTERM and Ctrl-C: a signal while a process starts would leave it without an owner to stop it.

    Python calls handlers in its main thread even if that thread blocks the signals, so the handlers are replaced. The
    signals are also blocked, which the processes started here inherit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {stop: signal.signal(stop, lambda number, _: arrived.append(number)) for stop in _STOPS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for stop, handler in handlers.items():
            signal.signal(stop, handler)
        for number in arrived:
            signal.raise_signal(number)
