"""Run a chat template with limits of time and memory, because templates are programs from untrusted sources.

Jinja's sandbox blocks access to files and objects, but not `{{ 'x' * 10**10 }}`, nested loops or `{{ 3 ** 10**9 }}`,
which is one instruction of Python and lasts for hours: nothing in the same process can interrupt it. So a template runs
in a process that can be spared, and the operating system ends that process after CPU_SECONDS. Memory has a limit of the
operating system too, beyond which Python raises MemoryError.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.sizes import render_bytes
from echelon.learn.data.child_process import ChildProcess, stops_held_back

CPU_SECONDS = 10.0
MEMORY_BYTES = 2**29

_MEASURE_SECONDS = 1.0

_Result = TypeVar("_Result")


class LimitError(Exception):
    """A template exceeded a limit. The message names it, for example `takes more than ...`."""


class _Ceiling:
    """A limit of the process's address space, some bytes above its current size. Only on Linux."""

    def __init__(self) -> None:
        self._size = 0
        self._measured_at = -_MEASURE_SECONDS

    def lower(self, room: int, anew: bool) -> tuple[int, int] | None:
        """Lower the limit and return the limits to restore. The current size is measured at intervals, or if `anew`."""
        if sys.platform != "linux":
            return None
        now = time.monotonic()
        if anew or now - self._measured_at > _MEASURE_SECONDS:
            pages = int(Path("/proc/self/statm").read_bytes().split()[0])
            self._size, self._measured_at = pages * resource.getpagesize(), now
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        ceiling = self._size + room
        resource.setrlimit(
            resource.RLIMIT_AS, (ceiling if soft == resource.RLIM_INFINITY else min(soft, ceiling), hard)
        )
        return soft, hard


_ceiling = _Ceiling()
_is_spare = False


def be_spare() -> None:
    """Declare that this process may be ended by a template; the one that started it finds out with `find_excess`."""
    global _is_spare
    _is_spare = True


def run_limited(prepare: Callable[[], object], call: Callable[[], _Result]) -> _Result:
    """Return the result of `call`, within CPU_SECONDS of CPU time and, on Linux, MEMORY_BYTES of additional memory.

    It runs in a process of its own that lives on, or in this one if that can be spared. Both are pickled, and so is the
    result; `call` must be pure, because it may run twice. Raises LimitError, and what `call` raises.

    Args:
        prepare: is called first, without limits, to import modules.
    """
    limits = CPU_SECONDS, MEMORY_BYTES
    if not _is_spare:
        return _helper.run(prepare, call, *limits)
    prepare()
    return run_here(call, *limits)


def run_here(call: Callable[[], _Result], cpu_seconds: float, memory_bytes: int) -> _Result:
    """Return the result of `call`, or raise LimitError for its memory. After `cpu_seconds`, this process is ended."""
    try:
        try:
            return _run(call, cpu_seconds, memory_bytes, anew=False)
        except MemoryError:  # the process itself may have grown since it was measured
            return _run(call, cpu_seconds, memory_bytes, anew=True)
    except MemoryError:
        raise LimitError(f"takes more than {render_bytes(memory_bytes)} of memory") from None


def _run(call: Callable[[], _Result], cpu_seconds: float, memory_bytes: int, anew: bool) -> _Result:
    before = _ceiling.lower(memory_bytes, anew)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # without a handler SIGPROF ends the process
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if before is not None:
            resource.setrlimit(resource.RLIMIT_AS, before)


def refuse_template(name: str, fault: object) -> ConfigError:
    """The error for the chat template `name` that exceeds a limit. It is not the fault of the record."""
    return ConfigError(f"{name} {fault} to render one conversation; use another data.chat_template, or fix this one.")


def find_excess(code: int | None) -> LimitError | None:
    """The limit for which a spare process was ended, from its exit code; None if it ended for another reason."""
    return LimitError(f"takes more than {CPU_SECONDS:g} s of CPU time") if code == -signal.SIGPROF else None


@contextmanager
def helper_ended() -> Iterator[None]:
    """A block after which the process that runs calls for this one is ended; a later call starts it again."""
    try:
        yield
    finally:
        _helper.end()


class _Helper:
    """The process that runs calls for this one. It starts with the first one, and anew after each that has ended it."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def run(self, prepare: Callable[[], object], call: Callable[[], _Result], *limits: float) -> _Result:
        with self._lock:
            if self._child is None or self._owner != os.getpid():  # that of the process that this one was forked from
                with stops_held_back():
                    self._child, self._owner = ChildProcess(_serve), os.getpid()
            try:
                self._child.connection.send((prepare, call, *limits))
                answer: Any = self._child.connection.recv()
            except (EOFError, OSError):
                code, self._child = self._child.wait_for_exit(), None
                raise find_excess(code) or EchelonError(
                    f"the process that renders conversations died (exit code {code}); it may have run out of memory."
                ) from None
            except BaseException:  # its answer would be taken for that of the next call
                self._child.stop()
                self._child = None
                raise
        if isinstance(answer, Exception):
            raise answer
        result: _Result = answer
        return result

    def end(self) -> None:
        with self._lock:
            if self._child is not None and self._owner == os.getpid():
                self._child.stop()
            self._child = None


_helper = _Helper()


def _serve(connection: Connection) -> None:
    be_spare()
    while True:
        try:
            prepare, call, *limits = connection.recv()
        except EOFError:
            return
        try:
            prepare()
            answer = run_here(call, *limits)
        except Exception as error:  # raised again by the one that asks
            answer = error
        connection.send(answer)
