"""Loads one damaged input with a real loader under limits, and judges the result."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.ground.errors import EchelonError

SECONDS = 30.0  # not counting the time in which other programs use the processors
MEMORY_BYTES = 2**31  # in addition to the memory of the process when the limit is set

REFUSED, RIGHT = "refused cleanly", "loaded right"


class TooLong(BaseException):
    """The time limit of an input is exceeded. Not an Exception, so that no handler of the loader catches it."""


class Refusals(EchelonError):
    """Several operations refuse the same input, each with its own message."""

    def __init__(self, errors: Sequence[EchelonError]) -> None:
        super().__init__(str(errors[0]))
        self.messages = [str(error) for error in errors]


@contextmanager
def limited_memory(more_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Within the block, an allocation far beyond the current memory of the process fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run_in_little_memory(code: str, *arguments: object, more_bytes: int) -> "subprocess.CompletedProcess[str]":
    """Run Python code, after its imports, in a process of its own that may have only this much more memory.

    `code` defines `work(arguments)`. A process that has freed memory before could use that again.
    """
    imports = "import sys\nfrom tests.fuzz import judge"
    limited = f"{code}\n{imports}\nwith judge.limited_memory({more_bytes}):\n    work(sys.argv[1:])\n"
    return subprocess.run(
        [sys.executable, "-c", limited, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TooLong if the block takes longer, not counting the time in which this thread waits for a processor."""
    started = _count_seconds()

    def stop(*_: object) -> None:
        left = seconds - (_count_seconds() - started)
        if left <= 0:
            raise TooLong
        signal.setitimer(signal.ITIMER_REAL, left)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _count_seconds() -> float:
    """Return the time, without what this thread has waited for a processor, as Linux counts it."""
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:
        waited = 0
    return time.monotonic() - waited / 1e9


@dataclass
class Tally:
    """Counts of results by kind of input; `failures` has a description of each failure."""

    marker: Path
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _outcomes: dict[Hashable, str] = field(default_factory=dict)

    def judge(
        self,
        kind: str,
        name: str,
        load: Callable[[], Any],
        is_right: Callable[[Any], bool],
        words: str,
        same: Hashable = None,
    ) -> None:
        """Load one input and record the result. `name` reproduces it; the message of a refusal must match `words`.

        `same`: equal for equal inputs, of which one is loaded; the others are counted with its result. None: load it.
        """
        counts = self.counts.setdefault(kind, Counter())
        counts["tried"] += 1
        if same is not None and (known := self._outcomes.get(same)) is not None:
            counts[known] += 1
            return
        counts["different"] += 1
        outcome, fault = self._load(load, is_right, words)
        if self.marker.exists():
            self.marker.rmdir()
            fault = f"ran code: {fault}"
        if fault is not None:
            outcome = "failed"
            self.failures.append(f"{kind}, {name}: {fault}")
        counts[outcome] += 1
        if same is not None:
            self._outcomes[same] = outcome

    @staticmethod
    def _load(load: Callable[[], Any], is_right: Callable[[Any], bool], words: str) -> tuple[str, str | None]:
        """Load one input within the limits; return the result, and what is wrong with it."""
        fault = None
        try:
            with limited_time(SECONDS):
                value = load()
            if not is_right(value):
                fault = f"loaded a wrong value: {str(value)[:200]}"
            outcome = RIGHT
        except EchelonError as error:
            outcome = REFUSED
            for message in error.messages if isinstance(error, Refusals) else [str(error)]:
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
        return outcome, fault

    @property
    def num_tried(self) -> int:
        """The number of inputs that were judged."""
        return sum(counts["tried"] for counts in self.counts.values())

    def table(self) -> str:
        """A table with a line for each kind, and the sums."""
        total = sum(self.counts.values(), Counter())
        width = max(map(len, self.counts), default=0)
        columns = ("tried", "different", REFUSED, RIGHT)
        lines = [f"{'':<{width}}  " + "  ".join(f"{column:>15}" for column in columns)]
        for kind, counts in (*self.counts.items(), ("all", total)):
            lines.append(f"{kind:<{width}}  " + "  ".join(f"{counts[column]:>15,}" for column in columns))
        return "\n".join(lines)
