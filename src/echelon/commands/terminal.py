"""What a command prints."""

import sys

import typer

from echelon.logs import log_to_console
from echelon.redaction import redact_text
from echelon.supervise.launch_environment import find_log_level


def show(line: str) -> None:
    """Print a line of the result at once, also when stdout is a pipe. What is told on the way there is logged."""
    typer.echo(line)
    sys.stdout.flush()


def complain(message: str) -> None:
    """Print what went wrong, under echelon's name and without what looks like a secret."""
    typer.echo(f"echelon: {redact_text(message)}", err=True)


def log_to_stderr() -> None:
    """Show on stderr what is logged from now on: a program may read the result from stdout."""
    log_to_console(find_log_level(), sys.stderr)
