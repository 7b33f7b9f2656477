"""Detects that training hangs: because of another rank, a lost network message, or a disk that does not answer."""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from typing_extensions import override

from echelon.ground.stored import write_text
from echelon.run.training.callbacks import FinishedStep, Monitor

logger = logging.getLogger(__name__)

# A resting rank renews its file after the first number of seconds; after the second, an old file no longer counts,
# because its rank was ended or suspended. A network file system may show a change a minute late.
_RENEWAL_SECONDS = 5.0
_STALE_SECONDS = 90.0
# How long ranks wait for their peers to notice the same hang, and the interval at which they look.
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_TICK_SECONDS = 0.5
# `auto`: the limit of the first steps; then a multiple of the longest wait so far, but at least so many seconds.
_FIRST_SECONDS, _FIRST_STEPS = 600.0, 10
_MULTIPLE, _LEAST_SECONDS = 20, 120.0
# Ranks ask what their peers do only after waiting for a quarter of the limit, and at most so many seconds.
_ASKING_SECONDS = 30.0


class WaitingPeers:
    """The ranks that write to the same folder: `resting-N` while rank N rests, `late-N` and `hanging-N` in a hang.

    Errors of the file system are ignored: the ranks then know nothing about each other.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._shown: tuple[int, float] | None = None
        self._seen: dict[int, tuple[int, float]] = {}

    def begin(self) -> None:
        """Remove what an earlier process of this rank has left."""
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            for kind in ("resting", "late", "hanging"):
                self._path(kind).unlink(missing_ok=True)

    def show_rest(self, number: int | None) -> None:
        """Show whether this rank rests; must be called again every few seconds while it does.

        `number`: counts the rests of all ranks together, from 1; 0 if this rank rests alone; None if it does not rest.
        """
        now = time.monotonic()
        with suppress(OSError):
            if number is None and self._shown is not None:
                self._shown = None
                self._path("resting").unlink(missing_ok=True)
            elif number is not None and self._is_old(number, now):
                self._shown = number, now
                self._path("resting").write_text(str(number), encoding="utf-8")

    def _is_old(self, number: int, now: float) -> bool:
        return self._shown is None or self._shown[0] != number or now - self._shown[1] > _RENEWAL_SECONDS

    def is_one_resting(self, number: int) -> bool:
        """Whether another rank rests, renews its file, and does not wait there for this rank.

        `number`: how many rests of all ranks together this one has begun.
        """
        now = time.monotonic()
        for rank in self._others():
            with suppress(OSError, ValueError):
                path = self._path("resting", rank)
                changed = path.stat().st_mtime_ns
                if self._seen.get(rank, (None, 0.0))[0] != changed:
                    self._seen[rank] = changed, now
                is_new = now - self._seen[rank][1] < _STALE_SECONDS
                if is_new and int(path.read_text(encoding="utf-8")) <= number:
                    return True
        return False

    def tell_late(self, seconds: float) -> None:
        """Tell the others that this rank has found a hang, after these seconds without progress."""
        with suppress(OSError):
            write_text(self._path("late"), f"{seconds:g}")

    def find_late(self) -> float | None:
        """Return the seconds after which another rank has found a hang; None if none has."""
        for rank in self._others():
            with suppress(OSError, ValueError):
                return float(self._path("late", rank).read_text(encoding="utf-8"))
        return None

    def find_unresponsive(self) -> list[int]:
        """Return the ranks that have not noticed the hang; every rank that has must call it. Raises OSError."""
        self._path("hanging").touch()
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (missing := self._find_missing()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return missing

    def _find_missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._path("hanging", rank).exists()]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def _path(self, kind: str, rank: int | None = None) -> Path:
        return self._folder / f"{kind}-{self._rank if rank is None else rank}"


class Heartbeat(Monitor):
    """Calls `on_timeout` if no progress is reported for too long.

    Time counts only while this process runs: a job or laptop that was suspended does not time out when it resumes. It
    does not count while this rank rests, or one of its peers.
    """

    def __init__(
        self,
        limit_seconds: float | Literal["auto"] | None = None,
        on_timeout: Callable[[str, float], None] = lambda what, seconds: None,
        peers: WaitingPeers | None = None,
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
