"""Where the records of echelon's loggers go: a console for people, and a log of each rank.

Every module logs under its own name, `logging.getLogger(__name__)`. Imported as a library, echelon installs no handler:
the records are the caller's to handle, with `log_to_console` or with handlers of their own.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from echelon.redaction import redact_text

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
"""The levels a user can choose, by name: `--verbose`, neither option, `--quiet`."""

_logger = logging.getLogger("echelon")


class RankFilter(logging.Filter):
    """Gives each record the `rank` of its process; None in a process that is no rank, such as a command.

    To be added to a handler, not to a logger: a logger's filters do not see the records of the loggers below it.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        record.rank = self._rank
        return True


class _Formatter(logging.Formatter):
    """Formats without what looks like a secret; times are UTC, as in events.jsonl."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Writes a record at once and in one piece. What cannot be written is dropped: a terminal that is gone, a pipe that
    nobody reads any more, or a full disk must not end a training."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif isinstance(error, BrokenPipeError):
            # What is left in the stream's buffer would fail again when the interpreter flushes it at its end.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)


class _StdoutHandler(_StreamHandler):
    """Writes to what is stdout when a record comes: a notebook, or `redirect_stdout`, may have replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def log_to_console(level: int = logging.INFO, console: TextIO | None = None) -> None:
    """Show what echelon logs from `level` on, as lines on `console`; None: stdout. For a command, script or notebook.

    A line is the message alone. With `logging.DEBUG` it begins with time, level, rank and logger. A second call
    replaces what an earlier one of this module has set; handlers that others have added stay.
    """
    _install([_console_handler(_StdoutHandler() if console is None else _StreamHandler(console), level, None)])


def log_as_rank(rank: int, log: TextIO, console: TextIO | None = None, level: int = logging.INFO) -> None:
    """Write what this rank logs to its log, and from `level` on to `console` if it has one.

    A line of the log begins with time, level, rank and logger; the log has everything from INFO on, however quiet the
    console is. Replaces what an earlier call of this module has set.
    """
    handlers = [_set_up(_StreamHandler(log), min(level, logging.INFO), rank, _detailed(rank))]
    if console is not None:
        handlers.append(_console_handler(_StreamHandler(console), level, rank))
    _install(handlers)


@contextmanager
def warnings_only(name: str) -> Iterator[None]:
    """During the block log nothing but warnings and errors under this logger and those below it."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _console_handler(handler: logging.Handler, level: int, rank: int | None) -> logging.Handler:
    return _set_up(handler, level, rank, _detailed(rank) if level <= logging.DEBUG else "%(message)s")


def _set_up(handler: logging.Handler, level: int, rank: int | None, line: str) -> logging.Handler:
    handler.setLevel(level)
    handler.addFilter(RankFilter(rank))
    handler.setFormatter(_Formatter(line))
    return handler


def _detailed(rank: int | None) -> str:
    return f"%(asctime)s %(levelname)s {'' if rank is None else 'rank %(rank)d '}%(name)s: %(message)s"


def _install(handlers: list[logging.Handler]) -> None:
    for old in [each for each in _logger.handlers if isinstance(each, _StreamHandler)]:
        _logger.removeHandler(old)
    for handler in handlers:
        _logger.addHandler(handler)
    _logger.setLevel(min(handler.level for handler in handlers))
    # A library that puts a handler on the root logger would show every line a second time.
    _logger.propagate = False
