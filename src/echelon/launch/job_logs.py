"""What a job leaves in its folder, where this machine sees it: lines of output, and in the end an exit code."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from echelon.launch.job import JobState
from echelon.supervise.outcome import DONE, STOPPED

_LOOK_SECONDS = 0.5


def read_exit_code(path: Path) -> int | None:
    """The code that stands in a file; None while there is none."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="utf-8"))
    return None


def name_ending(code: int) -> JobState:
    """How a job that left with this code has ended."""
    return "done" if code == DONE else "stopped" if code == STOPPED else "failed"


class Log:
    """A file that grows, read from its beginning on, whole lines at a time. It need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self, is_last: bool) -> list[str]:
        """The lines that have come since; `is_last`: also what is left of one without an end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return []
        if not is_last:
            text = text[: text.rfind(b"\n") + 1]
        self._position += len(text)
        return text.decode("utf-8", "replace").splitlines()

    def follow(self, has_ended: Callable[[], bool]) -> Iterator[str]:
        """The lines there are and those to come, until `has_ended`, which is asked before each reading."""
        while True:
            ended = has_ended()
            yield from self.read(ended)
            if ended:
                return
            time.sleep(_LOOK_SECONDS)


def rarely(ask: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """A question that is dear, asked at most every so many seconds; no in between."""
    asked_at = time.monotonic()

    def answer() -> bool:
        nonlocal asked_at
        if time.monotonic() < asked_at + seconds:
            return False
        asked_at = time.monotonic()
        return ask()

    return answer
