"""One damaged input through a real loader, under limits, and what is to be said of it."""

import re
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from echelon.errors import EchelonError

SECONDS = 30.0  # a busy machine may take many times what an idle one does
MEMORY_BYTES = 2**31  # beyond what the process has when the limit is set

REFUSED, RIGHT = "refused cleanly", "loaded right"


class TooLong(BaseException):
    """The time of an input is over; not an Exception, so that no handler of the loader's takes it."""


@contextmanager
def limited_memory() -> Iterator[None]:
    """An allocation that would take the process far beyond what it has now fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raises TooLong in the block when it takes longer."""

    def stop(*_: object) -> NoReturn:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Tally:
    """What became of the inputs, by kind; `failures` has a text for each that went wrong."""

    marker: Path
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def judge(self, kind: str, name: str, load: Callable[[], Any], is_right: Callable[[Any], bool], words: str) -> None:
        """Load one input. `name` reproduces it; a refusal must match the pattern `words`: a file or a key."""
        fault = None
        try:
            with limited_time(SECONDS):
                value = load()
            if not is_right(value):
                fault = f"loaded a wrong value: {str(value)[:200]}"
            outcome = RIGHT
        except EchelonError as error:
            outcome, message = REFUSED, str(error)
            if not re.search(words, message):
                fault = f"names neither a file nor a key: {message[:500]}"
            elif len(message) > 5000:
                fault = f"a message of {len(message)} characters: {message[:500]}"
        except TooLong:
            outcome = fault = f"took longer than {SECONDS:.0f} s\n{traceback.format_exc()[-3000:]}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome, fault = "traceback", "".join(traceback.format_exception(error)[-12:])[-4000:]
        if self.marker.exists():
            self.marker.rmdir()
            fault = f"ran code: {fault}"
        counts = self.counts.setdefault(kind, Counter())
        counts["tried"] += 1
        if fault is None:
            counts[outcome] += 1
        else:
            self.failures.append(f"{kind}, {name}: {fault}")

    def table(self) -> str:
        """A line for each kind, and their sum."""
        total = sum(self.counts.values(), Counter())
        width = max(map(len, self.counts), default=0)
        columns = ("tried", REFUSED, RIGHT)
        lines = [f"{'':<{width}}  " + "  ".join(f"{column:>15}" for column in columns)]
        for kind, counts in (*self.counts.items(), ("all", total)):
            lines.append(f"{kind:<{width}}  " + "  ".join(f"{counts[column]:>15,}" for column in columns))
        return "\n".join(lines)
