"""Read a job's log and exit code from its folder, for targets whose job folder is visible on this machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from echelon.ground.errors import ConfigError
from echelon.ground.stored import open_regular, read_text
from echelon.launch.job import JobState
from echelon.run.supervise.outcome import DONE, STOPPED

_LOOK_SECONDS = 0.5
# A long log is read in parts, of which each is a list of lines; a longer line is divided.
_PART_BYTES = 2**20


def read_exit_code(path: Path) -> int | None:
    """The exit code in a file; None while the file does not exist or has no number."""
    with suppress(OSError, ValueError):
        return int(read_text(path))
    return None


def name_ending(code: int) -> JobState:
    """The final state of a job with this exit code."""
    return "done" if code == DONE else "stopped" if code == STOPPED else "failed"


class Log:
    """A growing file, read from the start in whole lines. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self, is_last: bool) -> Iterator[str]:
        """Yield the lines added since the last read; with `is_last`, also an unfinished last line.

        Raises ConfigError if the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                file.seek(self._position)
                while part := self._next_part(file, is_last):
                    yield from part.decode("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}.") from error

    def _next_part(self, file: IO[bytes], is_last: bool) -> bytes:
        """Return whole lines, or a part of a line that has no end yet; empty if there is nothing to read."""
        text = file.read(_PART_BYTES)
        end = text.rfind(b"\n") + 1
        if not end and (is_last or len(text) == _PART_BYTES):
            end = len(text)
        text = text[:end]
        self._position += len(text)
        file.seek(self._position)
        return text

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
