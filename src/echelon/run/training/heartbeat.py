"""Detects that training hangs: because of another rank, a lost network message, or a disk that does not answer."""

import faulthandler
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from echelon.run.training.callbacks import FinishedStep, Monitor

if TYPE_CHECKING:
    from echelon.run.supervise.hangs import WaitingPeers

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
# `auto`: the limit of the first steps; then a multiple of the longest wait so far, but at least so many seconds.
_FIRST_SECONDS, _FIRST_STEPS = 600.0, 10
_MULTIPLE, _LEAST_SECONDS = 20, 120.0
# Ranks ask what their peers do only after waiting for a quarter of the limit, and at most so many seconds.
_ASKING_SECONDS = 30.0


class Heartbeat(Monitor):
    """Calls `on_timeout` if no progress is reported for too long.

    Time counts only while this process runs: a job or laptop that was suspended does not time out when it resumes. It
    does not count while this rank rests, or one of its peers.
    """

    def __init__(
        self,
        limit_seconds: float | Literal["auto"] | None = None,
        on_timeout: Callable[[str, float], None] = lambda what, seconds: None,
        peers: "WaitingPeers | None" = None,
    ) -> None:
        """`on_timeout` is called in a thread, and must not return.

        Args:
            limit_seconds: None: no limit; auto: derived from the durations so far.
            on_timeout: receives the name of the last activity, and the seconds that it was allowed.
            peers: the ranks with which this one shares files; None if it shares none. Without them `auto` stays above
                its first limit, because a rank that waits does not know what the others do.
        """
        self._given = limit_seconds
        self._on_timeout = on_timeout
        self._peers = peers
        self._lock = threading.Lock()  # torch compiles the backward pass in a thread of its own
        self._what = "the start"
        self._silent_ticks, self._longest_ticks = 0, 0
        self._steps, self._rests, self._rests_alone, self._common = 0, 0, 0, 0
        self._ended = threading.Event()

    @property
    def limit(self) -> float | None:
        """The seconds without progress after which the run counts as hanging; None for no limit."""
        if self._given != "auto":
            return self._given
        is_first = self._steps < _FIRST_STEPS or self._peers is None
        return max(_FIRST_SECONDS if is_first else _LEAST_SECONDS, _MULTIPLE * self._longest_ticks * _TICK_SECONDS)

    def start(self) -> None:
        """Start watching, if there is a limit."""
        if self._given is not None:
            if self._peers is not None:
                self._peers.begin()
            threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def beat(self, what: str) -> None:
        """Report progress; `what` names the activity that begins."""
        with self._lock:
            self._longest_ticks = max(self._longest_ticks, self._silent_ticks)
            self._what, self._silent_ticks = what, 0

    @override
    def on_metrics(self, step: FinishedStep) -> None:
        self.step(step.metrics.step + 2)

    def step(self, number: int) -> None:
        """Report that a step has ended and step `number` begins. Logs the limit when it is derived."""
        self.beat(f"step {number}")
        self._steps += 1
        if self._given == "auto" and self._steps == _FIRST_STEPS:
            logger.info(
                f"hangs: from now on {self.limit:g} s without progress count as a hang (fault.hang_seconds: auto); "
                "compiling, saving and evaluating may take longer"
            )

    def rest(self) -> None:
        """Begin a time without a limit, for work of this rank alone, such as a compilation; rests may be nested."""
        with self._lock:
            self._rests += 1
            self._rests_alone += 1

    def resume(self) -> None:
        """End what `rest` began."""
        with self._lock:
            self._rests -= 1
            self._rests_alone -= 1
            self._silent_ticks = 0

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Scope without a time limit, for work of this rank alone."""
        self.rest()
        try:
            yield
        finally:
            self.resume()

    @contextmanager
    def resting_together(self) -> Iterator[None]:
        """Scope without a time limit, for work of all ranks: a save waits for storage as long as it takes.

        Every rank must enter these scopes equally often: a rank that never enters one is not excused by those in it.
        """
        with self._lock:
            self._rests += 1
            self._common += 1
        try:
            yield
        finally:
            with self._lock:
                self._rests -= 1
                self._silent_ticks = 0

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            if (seconds := self.find_late()) is not None:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self._on_timeout(self._what, seconds)
        if self._peers is not None:
            self._peers.show_rest(None)

    def find_late(self) -> float | None:
        """Count a tick; return the seconds that this rank, or another one, was allowed; None if there is time left."""
        peers, limit, is_resting = self._peers, self.limit, self._rests > 0
        assert limit is not None
        if peers is not None:
            peers.show_rest((0 if self._rests_alone else self._common) if is_resting else None)
        if is_resting:
            return None
        if peers is not None and self._silent_ticks * _TICK_SECONDS > min(_ASKING_SECONDS, limit / 4):
            if peers.is_one_resting(self._common):
                return None
            if (seconds := peers.find_late()) is not None:
                return seconds
        with self._lock:
            self._silent_ticks += self._rests == 0
            if self._rests > 0 or self._silent_ticks * _TICK_SECONDS <= limit:
                return None
        if peers is not None:
            peers.tell_late(limit)
        return limit
