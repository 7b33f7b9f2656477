"""Output of commands: results, errors, and logging to stderr."""

import sys
from contextlib import suppress

import typer

from echelon.logs import keep_line, log_to_console
from echelon.redaction import redact_text
from echelon.supervise.launch_environment import find_log_level


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
        typer.echo(line, err=True)


def log_to_stderr() -> None:
    """Send log messages to stderr from now on, since a program may read the result from stdout."""
    log_to_console(find_log_level(), sys.stderr)
