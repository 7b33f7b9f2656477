"""Stop requests, by a signal or by the stop file that this process's agent writes; the end of its parent.

The stop file contains a signal's name. An agent forwards a stop to its workers through it, because a signal from the
agent itself means that a peer has failed and there is nothing left to save.
"""

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from echelon.ground.errors import LaunchError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

LIMITS = ("budget.max_hours", "budget.max_usd")
"""The recipe keys whose limits stop a run."""

STRAGGLER = "fault.on_straggler=stop"
"""The cause of a stop because a rank is slow."""

_CAUSES = (*(signum.name for signum in STOP_SIGNALS), *LIMITS, STRAGGLER)

ECHO_SECONDS = 1.0
"""Signals within this time count as one request, as when a terminal signals every process."""

LATE_SECONDS = 10.0
"""A command that a signal has not ended after this time is ended without cleanup."""

_LOOK_SECONDS = 0.2
_WATCHDOG_SECONDS = 0.5


class StopRequest:
    """Whether this process was asked to stop. The training loop polls the first request; a second ends the process."""

    def __init__(self) -> None:
        self.name: str | None = None
        """The signal's name, such as SIGTERM; None until a request."""
        self.limit: str | None = None
        """The one of LIMITS that is reached, or STRAGGLER, a stop request too; None until then. A later signal counts
        as the first one."""
        self.agreed: str | None = None
        """The signal or limit that all ranks have agreed to stop for; None while training goes on."""
        self._asked_at = 0.0
        self._leave: Callable[[str], None] = lambda name: None

    def listen(self, stop_file: Path | None, leave: Callable[[str], None]) -> None:
        """Handle STOP_SIGNALS from now on, and poll the stop file. Call it once, in the main thread.

        A thread reads the signals from a pipe, so that they are seen while the main thread is in a collective, a
        compilation or a wait for data, where no Python handler runs.

        Args:
            leave: called in that thread at the second request, with its signal's name; it does not return.
        """
        self._leave = leave
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            signal.signal(
                signum, lambda number, frame: None
            )  # without a handler the signal would not be written to the pipe
        threading.Thread(target=self._watch, args=(reading, stop_file), name="stop-request", daemon=True).start()

    def ask(self, name: str) -> None:
        """Request a stop, like a signal."""
        now = time.monotonic()
        if self.name is None:
            self.name, self._asked_at = name, now
        elif now - self._asked_at > ECHO_SECONDS:
            self._leave(name)

    def seconds_left(self, notice_seconds: float) -> float:
        """Seconds left of the notice; infinite until a request."""
        return math.inf if self.name is None else self._asked_at + notice_seconds - time.monotonic()

    def flags(self) -> list[float]:
        """One number for each signal and limit, 1 if it was requested; to be summed over ranks."""
        return [float(cause in (self.name, self.limit)) for cause in _CAUSES]

    def _watch(self, reading: int, stop_file: Path | None) -> None:
        while True:
            ready, _, _ = select.select([reading], [], [], _LOOK_SECONDS)
            if ready:
                for number in os.read(reading, 64):
                    if number in STOP_SIGNALS:
                        self.ask(signal.Signals(number).name)
            elif self.name is None and stop_file is not None and (name := read_stop_file(stop_file)):
                self.ask(name)


def agreed_stop(sums: Sequence[float]) -> str | None:
    """The signal, else the limit, for which a rank stops, from the sums of `StopRequest.flags`; None if none does."""
    return next((cause for cause, count in zip(_CAUSES, sums, strict=True) if count), None)


def read_stop_file(path: Path) -> str | None:
    """The name of the signal that an agent has forwarded to its workers; None if there was none."""
    try:
        return path.read_text(encoding="utf-8") or None
    except OSError:
        return None


def start_watchdog(parent: int) -> None:
    """End this process when the one that started it, `parent`, is gone, even if it was killed by SIGKILL."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCHDOG_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


@contextmanager
def handled(signals: Iterable[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Scope in which a handler gets these signals. For the main thread; afterwards the earlier handlers are back."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


BEFORE_TRAINING = "stopped by {signal} before training began; start the same command again"
"""The message of `stops_told` while a run is prepared."""


class _Stopped(BaseException):
    """SIGTERM or SIGINT arrived."""


@contextmanager
def stops_told(
    message: str = "stopped by {signal}; start the same command again",
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> Iterator[None]:
    """Turn signals into a LaunchError with this message, after cleanup of partial files. Then the process must end.

    For the main thread, outside of training. A second signal ends the process immediately. So does a thread, some time
    after the first one: a native function may return late, and threads that download are waited for at the exit.
    """
    stopped_by: list[str] = []

    def stop(number: int, _: object) -> NoReturn:
        for signum in before:
            signal.signal(signum, signal.SIG_DFL)
        stopped_by.append(signal.Signals(number).name)
        raise _Stopped

    def send_again(lost: "sys.UnraisableHookArgs") -> None:
        """The exception was raised in a finalizer, where Python drops it."""
        if lost.exc_type is not _Stopped:
            hook(lost)
            return
        number = signal.Signals[stopped_by[-1]]
        signal.signal(number, stop)
        late.send(number)

    before = {signum: signal.getsignal(signum) for signum in signals}
    hook, sys.unraisablehook = sys.unraisablehook, send_again
    for signum in before:
        signal.signal(signum, stop)
    late = _LateEnd(message, lambda number: number in before and (bool(stopped_by) or signal.getsignal(number) is stop))
    try:
        yield
        if stopped_by:  # the exception was lost
            raise _Stopped
    except BaseException as error:
        if not stopped_by:
            raise
        late.is_told = True
        # Any other error in the block is a consequence of the signal.
        raise LaunchError(message.format(signal=stopped_by[0])) from error
    finally:
        sys.unraisablehook = hook
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if not stopped_by:
            late.cancel()


class _LateEnd:
    """A thread that ends the process some seconds after a signal, or at a second one, whatever the main thread does.

    It reads the signals from a pipe: Python's handlers wait for the end of a native function.
    """

    def __init__(self, message: str, counts: Callable[[int], bool]) -> None:
        self._message = message
        self.is_told = False
        """Whether the main thread reports the stop itself."""
        self._counts = counts
        self._to_send: signal.Signals | None = None
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), name="late-end", daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        """Send the signal again from the thread, because its exception was lost."""
        self._to_send = number

    def cancel(self) -> None:
        """End the thread."""
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        os.close(self._writing)

    def _watch(self, reading: int) -> None:
        asked: tuple[str, float] | None = None
        sent = 0  # signals of this thread, which are no second request
        while asked is None or time.monotonic() < asked[1] + LATE_SECONDS:
            if self._to_send is not None:
                lost, self._to_send, sent = self._to_send, None, sent + 1
                os.kill(os.getpid(), lost)
            ready, _, _ = select.select([reading], [], [], None if asked is None else _LOOK_SECONDS)
            numbers = os.read(reading, 64) if ready else b""
            if ready and not numbers:  # cancelled
                os.close(reading)
                return
            for number in filter(self._counts, numbers):
                if asked is not None and sent:
                    sent -= 1
                    continue
                if asked is not None and time.monotonic() > asked[1] + ECHO_SECONDS:
                    self._end(asked[0])
                asked = asked or (signal.Signals(number).name, time.monotonic())
        self._end(asked[0])

    def _end(self, name: str) -> None:
        with suppress(OSError):
            if not self.is_told:
                os.write(2, f"echelon: {self._message.format(signal=name)}\n".encode())
        os._exit(LaunchError.exit_code)
