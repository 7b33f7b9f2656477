"""Output of commands: results, errors, and logging to stderr."""

import logging
import sys
from contextlib import suppress

import typer

from echelon.logs import keep_line, log_to_console
from echelon.redaction import redact_text
from echelon.supervise.launch_environment import find_log_level, find_look


def show(line: str) -> None:
    """Print a line of the result and flush, also if stdout is a pipe. Progress messages are logged instead."""
    typer.echo(line)
    sys.stdout.flush()


def show_piece(text: str) -> None:
    """Print a part of a line and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(message: str) -> None:
    """Print an error to stderr, with the prefix `echelon: ` and with secrets redacted; also to a kept console."""
    line = f"echelon: {redact_text(message)}"
    keep_line(line)
    with suppress(OSError):  # a closed terminal must not change the exit code
        colours = find_look(sys.stderr, logging.ERROR).has_colours
        typer.secho(line, err=True, fg="red" if colours else None, color=colours)


def log_to_stderr() -> None:
    """Send log messages to stderr from now on, since a program may read the result from stdout."""
    level = find_log_level()
    log_to_console(level, sys.stderr, find_look(sys.stderr, level))
