"""What a command prints."""

import sys

import typer

from echelon.redaction import redact_text


def say(line: str) -> None:
    """Print a line for the user at once, also when stdout is a pipe."""
    typer.echo(line)
    sys.stdout.flush()


def complain(message: str) -> None:
    """Print what went wrong, under echelon's name and without what looks like a secret."""
    typer.echo(f"echelon: {redact_text(message)}", err=True)


def say_aside(line: str) -> None:
    """Print a line beside the result, which may be read from stdout."""
    typer.echo(line, err=True)
