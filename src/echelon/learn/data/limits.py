"""Run a chat template with limits of time and memory, because templates are programs from untrusted sources.

Jinja's sandbox blocks access to files and objects, but not `{{ 'x' * 10**10 }}` or nested loops. So a template runs
with a timer and with a memory limit of the operating system. Both are needed: Python handles the timer's signal only
between bytecode instructions, and a single instruction that takes long also needs much memory.
"""

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

from echelon.ground.sizes import render_bytes

CPU_SECONDS = 10.0
MEMORY_BYTES = 2**29

_REPEAT_SECONDS = 1.0
_MEASURE_SECONDS = 1.0

_Result = TypeVar("_Result")


class _OverTime(BaseException):
    """Raised by the timer at any point of the template. Not an Exception, because Jinja swallows some of them."""


class LimitError(Exception):
    """A template exceeded a limit. The message names it, for example `takes more than ...`."""


class _Clock:
    """The process's timer. It works only in the main thread, where Python runs signal handlers."""

    def __init__(self) -> None:
        self.runs = False
        self._is_set_up = False

    def start(self) -> bool:
        """Start the timer. Returns False outside the main thread, where there is none."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._is_set_up:
            signal.signal(signal.SIGVTALRM, self._ring)  # kept: a late signal finds `runs` False and does nothing
            self._is_set_up = True
        self.runs = True
        # Repeated, because an exception that is raised while Python cleans up is lost.
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, _REPEAT_SECONDS)
        return True

    def stop(self) -> None:
        """Stop the timer."""
        self.runs = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.runs:
            raise _OverTime


class _Ceiling:
    """A limit of the process's address space, MEMORY_BYTES above its current size. Only on Linux."""

    def __init__(self) -> None:
        self._size = 0
        self._measured_at = -_MEASURE_SECONDS

    def lower(self, anew: bool) -> tuple[int, int] | None:
        """Lower the limit and return the limits to restore. The current size is measured at intervals, or if `anew`."""
        if sys.platform != "linux":
            return None
        now = time.monotonic()
        if anew or now - self._measured_at > _MEASURE_SECONDS:
            pages = int(Path("/proc/self/statm").read_bytes().split()[0])
            self._size, self._measured_at = pages * resource.getpagesize(), now
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        ceiling = self._size + MEMORY_BYTES
        resource.setrlimit(
            resource.RLIMIT_AS, (ceiling if soft == resource.RLIM_INFINITY else min(soft, ceiling), hard)
        )
        return soft, hard


_clock, _ceiling = _Clock(), _Ceiling()


def run_limited(call: Callable[[], _Result]) -> _Result:
    """Return the result of `call`, which must be pure: it may run twice and may be aborted at any point.

    The limits are CPU_SECONDS of CPU time, in the main thread, and on Linux MEMORY_BYTES of additional memory. Import
    modules before the call. Raises LimitError.
    """
    try:
        try:
            return _run(call, anew=False)
        except MemoryError:  # the process itself may have grown since it was measured
            return _run(call, anew=True)
    except MemoryError:
        raise LimitError(f"takes more than {render_bytes(MEMORY_BYTES)} of memory") from None
    except _OverTime:
        raise LimitError(f"takes more than {CPU_SECONDS:g} s of CPU time") from None


def _run(call: Callable[[], _Result], anew: bool) -> _Result:
    before = _ceiling.lower(anew)
    has_clock = _clock.start()
    try:
        try:
            return call()
        finally:
            _clock.runs = False  # if the timer fires just before this, the outer block still cleans up
    finally:
        if before is not None:
            resource.setrlimit(resource.RLIMIT_AS, before)
        if has_clock:
            _clock.stop()
