"""Handlers for the records of echelon's loggers: a console for people, and a log file of each rank.

Every module logs under its own name, `logging.getLogger(__name__)`. Imported as a library, echelon installs no handler:
the caller handles the records, with `log_to_console` or own handlers.
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
    """Sets the `rank` of each record to that of its process; None in a process that is not a rank.

    Add it to a handler, not to a logger: a logger's filters do not see the records of its child loggers.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        record.rank = self._rank
        return True


class _Formatter(logging.Formatter):
    """Formats records with secrets redacted; times are UTC, as in events.jsonl."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Writes each record immediately and atomically. Records that cannot be written are dropped: a closed terminal, a
    broken pipe or a full disk must not end a training."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif isinstance(error, BrokenPipeError):
            # The rest of the stream's buffer would fail again when the interpreter flushes it at exit.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)


class _StdoutHandler(_StreamHandler):
    """Writes to the current stdout: a notebook or `redirect_stdout` may have replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def log_to_console(level: int = logging.INFO, console: TextIO | None = None) -> None:
    """Show echelon's log messages from `level` on as lines on `console`; None: stdout. For commands and notebooks.

    A line is only the message. With `logging.DEBUG` it starts with time, level, rank and logger. A second call replaces
    the handlers of an earlier one; handlers added by others stay.
    """
    _install([_console_handler(_StdoutHandler() if console is None else _StreamHandler(console), level, None)])


def log_as_rank(rank: int, log: TextIO, console: TextIO | None = None, level: int = logging.INFO) -> None:
    """Write this rank's log messages to its log file, and from `level` on to `console`, if given.

    A line of the log file starts with time, level, rank and logger; the file has at least everything from INFO on,
    whatever `level` is. Replaces the handlers of an earlier call.
    """
    handlers = [_set_up(_StreamHandler(log), min(level, logging.INFO), rank, _detailed(rank))]
    if console is not None:
        handlers.append(_console_handler(_StreamHandler(console), level, rank))
    _install(handlers)


@contextmanager
def warnings_only(name: str) -> Iterator[None]:
    """Restrict this logger and its children to warnings and errors during the block."""
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
