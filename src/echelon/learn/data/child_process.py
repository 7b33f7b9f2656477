"""A process that works for this one over a pipe, and can be ended at any moment.

Processes are started with `spawn`: forking a process with threads can hang.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

from echelon.ground.errors import ConfigError, TrainingError, first_line
from echelon.ground.extensions import find_named
from echelon.ground.stop_request import start_watchdog

START_SECONDS = 120.0
"""Longest time for an AnsweringProcess to start and import what it needs."""

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
        with _without_main():
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


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running the script of this process again in the one that it starts.

    A script needs no `if __name__ == "__main__"` then. `work` is not defined there.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(parent: int, work: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    """Do the work in the new process. The parent handles Ctrl-C."""
    start_watchdog(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # the parent blocked them while starting it
    work(connection, *arguments)


class AnsweringProcess:
    """A child process that answers requests one after another, and is started again if it fails.

    For code of the user's: one that hangs is ended, one that crashes takes nothing with it.
    """

    def __init__(self, key: str, work: Callable[..., None], *arguments: Any) -> None:
        """Start the process, and wait until it is ready.

        Args:
            key: the recipe key that asks for it, for messages.
            work: calls `serve`.

        Raises:
            ConfigError: it cannot be used, for a reason that the process gave.
        """
        self._key, self._work, self._arguments = key, work, arguments
        self._child = self._start()

    def close(self) -> None:
        """End the process."""
        self._child.stop()

    def send(self, request: Any) -> None:
        """Send a request, and return while the process works on it. Raises as `receive`."""
        try:
            self._child.connection.send(request)
        except OSError:
            self._fail()

    def receive(self, seconds: float) -> Any:
        """Return the next answer, of which one request may have several.

        Raises:
            TimeoutError: it takes longer than `seconds`.
            ChildProcessError: the process has ended; the message is a clause. After both it has started again.
            TrainingError: it cannot be started again.
        """
        try:
            if self._child.connection.poll(seconds):
                return self._child.connection.recv()
        except (EOFError, OSError):
            self._fail()
        self._restart()
        raise TimeoutError

    def _fail(self) -> NoReturn:
        self._restart()
        raise ChildProcessError("ended the process in which it ran")

    def _restart(self) -> None:
        self._child.stop()
        try:
            self._child = self._start()
        except ConfigError as error:
            raise TrainingError(f"{self._key}: its process cannot be started again: {error}") from error

    def _start(self) -> ChildProcess:
        with stops_held_back():
            child = ChildProcess(self._work, *self._arguments)
        try:
            problem = f"{self._key}: its code was not imported within {START_SECONDS:g} seconds; import less there."
            if child.connection.poll(START_SECONDS):
                problem = child.connection.recv()
        except (EOFError, OSError):
            problem = f"{self._key}: the process of its code ended while it was imported."
        if problem is not None:
            child.stop()
            raise ConfigError(problem)
        return child


def serve(connection: Connection, build: Callable[[], Callable[[Any], Iterable[Any]]]) -> None:
    """Answer the requests of an AnsweringProcess until it closes the pipe.

    `build` returns the function that is called with each request and yields its answers; it may raise ConfigError.
    """
    try:
        respond = build()
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(None)
    with suppress(EOFError, OSError):
        while True:
            for answer in respond(connection.recv()):
                connection.send(answer)


def find_of_user(key: str, name: str, table: Mapping[str, Any], kind: type | None = None) -> Any:
    """Import what a recipe names, in a process whose only work it is.

    Raises ConfigError as `find_named`, and for a module of the user's that raises anything while it is imported.
    """
    try:
        return find_named(key, name, table, kind)
    except ConfigError:
        raise
    except Exception as error:  # it is the user's module
        raise ConfigError(
            f"{key}={name}: its module raised {type(error).__name__}: {first_line(error)}; correct it."
        ) from error


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
