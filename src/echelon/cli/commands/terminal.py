"""Output of commands: results, errors, and logging to stderr. No other file of the commands writes to a stream."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import typer

from echelon.ground.launch_environment import find_log_level, find_look
from echelon.ground.logs import keep_line, log_to_console
from echelon.ground.redaction import make_encodable, make_printable, redact_text

_CLEAR = "\x1b[H\x1b[J"


def show(line: str) -> None:
    """Print a line of the result and flush, also if stdout is a pipe. Progress messages are logged instead.

    Control characters are replaced: the line may quote a file or a model of a stranger.
    """
    typer.echo(make_printable(line))
    sys.stdout.flush()


def show_made(text: str, end: str = "\n") -> None:
    """Print text that a program may go on with, a model's for example, and flush.

    A pipe or a file gets it as it is; on a terminal control characters are replaced.
    """
    sys.stdout.write((make_printable if sys.stdout.isatty() else make_encodable)(text + end))
    sys.stdout.flush()


def show_piece(text: str) -> None:
    """Print a part of such a text."""
    show_made(text, end="")


def show_styled(parts: Iterable[tuple[str, str]], coloured: bool) -> None:
    """Print a line of parts, each a text and its style, such as `green`."""
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(*((make_printable(part), style) for part, style in parts))
    Console(highlight=False, soft_wrap=True, no_color=not coloured).print(text)


def clear_terminal() -> None:
    """Clear the terminal's window, and go on at its top."""
    sys.stdout.write(_CLEAR)


def complain(message: str, machine_line: str | None = None) -> None:
    """Print an error to stderr, with the prefix `echelon: `, with secrets and control characters replaced; also to a
    kept console.

    `machine_line`: what stderr gets instead, for programs.
    """
    line = f"echelon: {make_printable(redact_text(message))}"
    keep_line(line)
    with suppress(OSError):  # a closed terminal must not change the exit code
        if machine_line is not None:
            typer.echo(machine_line, err=True)
            return
        colours = find_look(sys.stderr, logging.ERROR).has_colours
        typer.secho(line, err=True, fg="red" if colours else None, color=colours)


@contextmanager
def stdout_kept_for_result(wanted: bool) -> Iterator[None]:
    """If wanted, send to stderr what this process, native code and child processes write to stdout in the block."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def log_to_stderr() -> None:
    """Send log messages to stderr from now on, since a program may read the result from stdout."""
    level = find_log_level()
    log_to_console(level, sys.stderr, find_look(sys.stderr, level))
