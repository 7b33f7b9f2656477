"""Log the progress of a long job."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from echelon.ground.sizes import render_bytes, render_duration, render_seconds


@dataclass
class Progress:
    """Logs the progress of a job: bytes, rate and time left, about every `every_seconds`, and once at the end.

    `logger` is that of the module that does the job. `total_bytes` is 0 if unknown. `done_bytes` may start with the
    bytes done by an earlier attempt.
    """

    name: str
    total_bytes: int
    logger: logging.Logger
    level: int = logging.INFO
    every_seconds: float = 2.0
    clock: Callable[[], float] = time.monotonic
    done_bytes: int = 0
    _before: int = field(init=False)
    _started: float = field(init=False)
    _logged: float = field(init=False)

    def __post_init__(self) -> None:
        self._before = self.done_bytes
        self._started = self._logged = self.clock()

    def add(self, num_bytes: int) -> None:
        """Count bytes as done, and log it if it is time."""
        self.done_bytes += num_bytes
        now = self.clock()
        is_complete = 0 < self.total_bytes <= self.done_bytes  # `finish` follows, and says so
        if now - self._logged >= self.every_seconds and not is_complete:
            self._logged = now
            rate = (self.done_bytes - self._before) / (now - self._started)
            left = ""
            if self.total_bytes and rate > 0:
                seconds = max(0, self.total_bytes - self.done_bytes) / rate
                left = f", about {render_duration(max(1.0, seconds))} left"
            self._log(f"{self._describe(rate)}{left}")

    def finish(self) -> None:
        """Log the total."""
        seconds = max(self.clock() - self._started, 1e-3)
        self._log(f"{self._describe((self.done_bytes - self._before) / seconds)}, {render_seconds(seconds)} in total")

    def _log(self, line: str) -> None:
        self.logger.log(self.level, line)

    def _describe(self, rate: float) -> str:
        total = f" of {render_bytes(self.total_bytes)}" if self.total_bytes else ""
        return f"{self.name}: {render_bytes(self.done_bytes)}{total}, {render_bytes(rate)}/s"
