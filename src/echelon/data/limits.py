"""Runs a chat template with limits of time and memory, because templates are programs from untrusted sources.

Jinja's sandbox keeps a template from files and objects, and not from `{{ 'x' * 10**10 }}` or loops in loops. So it runs
against a clock and below a ceiling that the system keeps, which hold for whatever a template can write. Only both
together end everything: Python looks at the clock between its instructions, and one instruction that would take long
needs memory.
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

CPU_SECONDS = 10.0
MEMORY_BYTES = 2**29

_REPEAT_SECONDS = 1.0
_MEASURE_SECONDS = 1.0

_Result = TypeVar("_Result")


class _OverTime(BaseException):
    """Raised by the clock wherever the template is; not an Exception, for Jinja swallows some of those."""


class LimitError(Exception):
    """A template took more than it may have; the message says what, as `takes more than ...`."""


class _Clock:
    """The process's own alarm, for its main thread alone: that is where Python runs handlers of signals."""

    def __init__(self) -> None:
        self.runs = False
        self._is_set_up = False

    def start(self) -> bool:
        """False where there is no clock: in another thread than the main one."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._is_set_up:
            signal.signal(signal.SIGVTALRM, self._ring)  # for good: one that comes late finds that nothing runs
            self._is_set_up = True
        self.runs = True
        # Again and again, for an exception that is raised while Python cleans up is lost.
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, _REPEAT_SECONDS)
        return True

    def stop(self) -> None:
        """No alarm any more."""
        self.runs = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.runs:
            raise _OverTime


class _Ceiling:
    """The most address space that the process may take, MEMORY_BYTES above what it has. Linux alone keeps it."""

    def __init__(self) -> None:
        self._size = 0
        self._measured_at = -_MEASURE_SECONDS

    def lower(self, anew: bool) -> tuple[int, int] | None:
        """The limits to restore. What the process has is measured now and then, for that takes long, or `anew`."""
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
    """The result of `call`, which is to be pure: it may be called twice, and ended anywhere.

    It gets CPU_SECONDS of the process's time, in the main thread, and on Linux MEMORY_BYTES beside what the process
    has. Imports belong before it. Raises LimitError.
    """
    try:
        try:
            return _run(call, anew=False)
        except MemoryError:  # the process itself may have grown since it was measured
            return _run(call, anew=True)
    except MemoryError:
        raise LimitError(f"takes more than {MEMORY_BYTES / 2**20:.0f} MiB of memory") from None
    except _OverTime:
        raise LimitError(f"takes more than {CPU_SECONDS:g} s of computing") from None


def _run(call: Callable[[], _Result], anew: bool) -> _Result:
    before = _ceiling.lower(anew)
    has_clock = _clock.start()
    try:
        try:
            return call()
        finally:
            _clock.runs = False  # where the alarm strikes just before this, the outer block still cleans up
    finally:
        if before is not None:
            resource.setrlimit(resource.RLIMIT_AS, before)
        if has_clock:
            _clock.stop()
