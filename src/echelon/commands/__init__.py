"""Commands that have a file of their own, and what they share with `cli.py`. Imports of substance are inside them."""

import sys
from pathlib import Path

import typer

from echelon.errors import ConfigError


def say(line: str) -> None:
    """Print a line for the user at once, also when stdout is a pipe."""
    typer.echo(line)
    sys.stdout.flush()


def require_folder(path: Path) -> None:
    """Raise ConfigError unless there is a folder."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run folder (runs/NAME) or an HF model folder.")
