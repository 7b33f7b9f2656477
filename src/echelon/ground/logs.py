"""Handlers for the records of echelon's loggers: a console for people, a copy of it in a file, and a log of each rank.

Every module logs under its own name, `logging.getLogger(__name__)`. Imported as a library, echelon installs no handler:
the caller handles the records, with `log_to_console` or own handlers.
"""

import errno
import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from typing_extensions import override

from echelon.ground.redaction import make_printable, redact_text

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
"""The levels a user can choose, by name: `--verbose`, neither option, `--quiet`."""

EMPHASIZED: dict[str, Any] = {"emphasized": True}
"""`extra` of a record whose line is bold on a console with colours."""

ON_PROGRESS_BAR: dict[str, Any] = {"on_progress_bar": True}
"""`extra` of a record that a console with a progress bar leaves out, because the bar shows it."""

_STYLES = ((logging.ERROR, "red"), (logging.WARNING, "yellow"))

# Moves to the start of a terminal's line, and erases it.
_ERASE_LINE = "\r\x1b[2K"

_logger = logging.getLogger("echelon")


@dataclass(frozen=True)
class Look:
    """How a console shows lines: in colours, and with a progress bar below them."""

    has_colours: bool = False
    has_bar: bool = False


PLAIN = Look()
"""Lines without control codes, for everything that is not a terminal."""


class RankFilter(logging.Filter):
    """Sets the `rank` of each record to that of its process; None in a process that is not a rank.

    Add it to a handler, not to a logger: a logger's filters do not see the records of its child loggers.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        record.rank = self._rank
        return True


class _Formatter(logging.Formatter):
    """Formats records with secrets and control characters replaced; times are UTC, as in events.jsonl."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    @override
    def format(self, record: logging.LogRecord) -> str:
        return make_printable(redact_text(super().format(record)))


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Writes each record immediately and atomically. Records that cannot be written are dropped: a closed terminal, a
    broken pipe or a full disk must not end a training."""

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        else:
            _drop_rest(self.stream, error)


class _StdoutHandler(_StreamHandler):
    """Writes to the current stdout: a notebook or `redirect_stdout` may have replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    @override
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _drop_rest(stream: TextIO, error: OSError) -> None:
    if error.errno in (errno.EPIPE, errno.EIO):  # a broken pipe, a closed terminal
        # The rest of the stream's buffer would fail again when the interpreter flushes it at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _LastingStream:
    """A text stream that drops what cannot be written; None: the current stdout. `rich` would end the process."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream or sys.stdout, name)

    def write(self, text: str) -> int:
        try:
            return (self._stream or sys.stdout).write(text)
        except OSError as error:
            _drop_rest(self._stream or sys.stdout, error)
            return len(text)

    def flush(self) -> None:
        try:
            (self._stream or sys.stdout).flush()
        except OSError as error:
            _drop_rest(self._stream or sys.stdout, error)


class _TerminalHandler(_StreamHandler):
    """Writes lines above a progress bar of the same `rich` console, in the colours of their level."""

    def __init__(self, stream: TextIO | None, look: Look) -> None:
        from rich.console import Console

        super().__init__(stream)
        self.has_bar = look.has_bar
        self.console = Console(
            file=cast(TextIO, _LastingStream(stream)),
            force_terminal=True,
            color_system="standard",
            no_color=not look.has_colours,
            highlight=False,
        )

    @override
    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        if self.has_bar and getattr(record, "on_progress_bar", False):
            return
        style = next((style for level, style in _STYLES if record.levelno >= level), "")
        try:
            line = Text(self.format(record), style="bold" if getattr(record, "emphasized", False) else style)
            self.console.print(line, soft_wrap=True)
        except Exception:
            self.handleError(record)


class _ConsoleCopy(_StreamHandler):
    """Collects the console's lines in memory until it gets a file, to which it appends them and all that follow."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())

    def write_to(self, path: Path) -> None:
        """Append to this file from now on, if it can be opened; a second call changes nothing."""
        if not isinstance(self.stream, io.StringIO):
            return
        with suppress(OSError):  # a disk that cannot keep the console may still keep the checkpoints
            collected = self.stream.getvalue()
            self.setStream(_open_to_append(path))
            self.write(collected)

    def write(self, text: str) -> None:
        """Append text that is not a log record."""
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()


def log_to_console(level: int = logging.INFO, console: TextIO | None = None, look: Look = PLAIN) -> None:
    """Show echelon's log messages from `level` on as lines on `console`; None: stdout. For commands and notebooks.

    A line is only the message. With `logging.DEBUG` it starts with time, level, rank and logger. A second call replaces
    the handlers of an earlier one; handlers added by others stay.
    """
    _install([_console_handler(_build_handler(console, look), level, None)])


def log_as_rank(
    rank: int,
    log: TextIO,
    console: TextIO | None = None,
    level: int = logging.INFO,
    copy: Path | None = None,
    look: Look = PLAIN,
) -> None:
    """Write this rank's log messages to its log file, from `level` on to `console`, and to `copy`, the file that keeps
    the console, if given.

    A line of the log file starts with time, level, rank and logger. Both files have at least everything from INFO on,
    whatever `level` is. Replaces the handlers of an earlier call.
    """
    handlers = [_set_up(_StreamHandler(log), min(level, logging.INFO), rank, _detailed(rank))]
    if console is not None:
        handlers.append(_console_handler(_build_handler(console, look), level, rank))
    _install(handlers)
    if copy is not None:
        keep_console_in(copy, rank)


def find_bar_console() -> "Console | None":
    """The `rich` console above which a progress bar may be shown; None if the console has none."""
    return next((terminal.console for terminal in _terminals() if terminal.has_bar), None)


def erase_progress_bar() -> None:
    """Erase the line of a progress bar that another process was killed over, if this process shares its console."""
    for terminal in _terminals():
        if terminal.has_bar:
            terminal.console.file.write(_ERASE_LINE)
            terminal.console.file.flush()


def keep_console(rank: int | None = None) -> None:
    """Collect the lines of the console from now on, for `keep_console_in`; also INFO lines that a quiet console omits.

    Call it after `log_to_console`, which ends it.
    """
    if _find_copy() is None:
        level = min(_logger.level or logging.INFO, logging.INFO)
        _logger.addHandler(_console_handler(_ConsoleCopy(), level, rank))
        _logger.setLevel(level)


def keep_console_in(path: Path, rank: int | None = None) -> None:
    """Append the collected lines, and all that follow, to a file that several processes may append to.

    Without an earlier `keep_console` or `keep_console_in`, only what follows.
    """
    keep_console(rank)
    if (copy := _find_copy()) is not None:
        copy.write_to(path)


def keep_line(line: str) -> None:
    """Add a line that was printed without a logger to the kept console, if it is kept, as log lines are written."""
    if (copy := _find_copy()) is not None:
        copy.write(f"{make_printable(redact_text(line))}\n")


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


def _build_handler(console: TextIO | None, look: Look) -> _StreamHandler:
    if look != PLAIN:
        return _TerminalHandler(console, look)
    return _StdoutHandler() if console is None else _StreamHandler(console)


def _terminals() -> list[_TerminalHandler]:
    return [handler for handler in _logger.handlers if isinstance(handler, _TerminalHandler)]


def _find_copy() -> _ConsoleCopy | None:
    return next((handler for handler in _logger.handlers if isinstance(handler, _ConsoleCopy)), None)


def _open_to_append(path: Path) -> TextIO:
    from echelon.ground.stored import (
        open_to_append,  # imports pydantic, for which a command without a file need not wait
    )

    # Each line is one write, so lines of two processes do not mix.
    return io.TextIOWrapper(io.BufferedWriter(open_to_append(path)), encoding="utf-8", line_buffering=True)


def _set_up(handler: logging.Handler, level: int, rank: int | None, line: str) -> logging.Handler:
    handler.setLevel(level)
    handler.addFilter(RankFilter(rank))
    handler.setFormatter(_Formatter(line))
    return handler


def _detailed(rank: int | None) -> str:
    return f"%(asctime)s %(levelname)s {'' if rank is None else 'rank %(rank)d '}%(name)s: %(message)s"


def _install(handlers: list[logging.Handler]) -> None:
    for old in [handler for handler in _logger.handlers if isinstance(handler, _StreamHandler)]:
        _logger.removeHandler(old)
    for handler in handlers:
        _logger.addHandler(handler)
    _logger.setLevel(min(handler.level for handler in handlers))
    # With torchao installed, an import of transformers warns of kernels for other devices, and torch of torchao itself.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A library that puts a handler on the root logger would show every line a second time.
    _logger.propagate = False
