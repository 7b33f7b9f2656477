"""What a command prints, and how a signal ends it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from echelon.redaction import redact_text


def say(line: str) -> None:
    """Print a line for the user at once, also when stdout is a pipe."""
    typer.echo(line)
    sys.stdout.flush()


def complain(message: str) -> None:
    """Print what went wrong, under echelon's name and without what looks like a secret."""
    typer.echo(f"echelon: {redact_text(message)}", err=True)


class _Stopped(BaseException):
    """SIGTERM or SIGINT arrived while this process itself was at work."""


@contextmanager
def stops_told() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into one line and exit code 1, after what was half-made has been taken away.

    A second one ends the process at once.
    """
    stopped_by: list[str] = []

    def stop(number: int, _: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        stopped_by.append(signal.Signals(number).name)
        raise _Stopped

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    except BaseException as error:
        if not stopped_by:
            raise
        # Whatever else came up in its wake is of its making.
        complain(f"stopped by {stopped_by[0]} before training began; start the same command again")
        raise typer.Exit(1) from error
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
