"""Read a job's log and exit code from its folder, for targets whose job folder is visible on this machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from echelon.launch.job import JobState
from echelon.supervise.outcome import DONE, STOPPED

_LOOK_SECONDS = 0.5


def read_exit_code(path: Path) -> int | None:
    """The exit code in a file; None while the file does not exist or has no number."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="utf-8"))
    return None


def name_ending(code: int) -> JobState:
    """The final state of a job with this exit code."""
    return "done" if code == DONE else "stopped" if code == STOPPED else "failed"


class Log:
    """A growing file, read from the start in whole lines. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self, is_last: bool) -> list[str]:
        """The lines added since the last read; with `is_last`, also an unfinished last line."""
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
        """Yield existing and new lines until `has_ended`, which is called before each read."""
        while True:
            ended = has_ended()
            yield from self.read(ended)
            if ended:
                return
            time.sleep(_LOOK_SECONDS)


def rarely(ask: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Limit the expensive check `ask` to one call every `seconds`; in between the answer is False."""
    asked_at = time.monotonic()

    def answer() -> bool:
        nonlocal asked_at
        if time.monotonic() < asked_at + seconds:
            return False
        asked_at = time.monotonic()
        return ask()

    return answer
