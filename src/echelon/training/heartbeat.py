"""Detects that training hangs: because of another rank, a lost network message, or a disk that does not answer."""

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TICK_SECONDS = 0.5
# Ranks that wait for the same peer notice it within a few ticks of each other.
_PEERS_SECONDS = 2.0


class Heartbeat:
    """Calls `on_timeout` if no progress is reported for too long.

    Time counts only while this process runs: a job or laptop that was suspended does not time out when it resumes.
    """

    def __init__(
        self, limit_seconds: float | None = None, on_timeout: Callable[[str], None] = lambda what: None
    ) -> None:
        """`on_timeout` receives the name of the last activity. It is called in a thread and must not return.

        Without a limit it is never called.
        """
        self._limit = limit_seconds
        self._on_timeout = on_timeout
        self._what = "the start"
        self._silent_ticks = 0
        self._is_resting = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Start watching, if there is a limit."""
        if self._limit is not None:
            threading.Thread(target=self._watch, args=(self._limit,), name="heartbeat", daemon=True).start()

    def beat(self, what: str) -> None:
        """Report progress; `what` names the activity that begins."""
        self._what, self._silent_ticks = what, 0

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Scope without a time limit: a save waits for storage as long as it takes."""
        self._is_resting = True
        try:
            yield
        finally:
            self._is_resting, self._silent_ticks = False, 0

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self, limit: float) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self._silent_ticks += not self._is_resting
            if self._silent_ticks * _TICK_SECONDS > limit:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self._on_timeout(self._what)


def find_unresponsive_ranks(folder: Path, rank: int, world_size: int) -> list[int]:
    """Return the ranks that have not noticed the hang. Every rank that has must call it, with the same folder."""
    (folder / f"hanging-{rank}").touch()
    threading.Event().wait(_PEERS_SECONDS)
    return [peer for peer in range(world_size) if not (folder / f"hanging-{peer}").exists()]
