"""Commands that have a file of their own, and what they share with `cli.py`. Imports of substance are inside them."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from echelon.errors import ConfigError
from echelon.redaction import redact_text

if TYPE_CHECKING:
    from echelon.recipe import Recipe

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that win over the file, dotted.")
]
NprocOption = Annotated[
    str, typer.Option("--nproc", metavar="N|auto", help="Processes; auto: one per GPU, or per two CPU cores.")
]


def say(line: str) -> None:
    """Print a line for the user at once, also when stdout is a pipe."""
    typer.echo(line)
    sys.stdout.flush()


def require_folder(path: Path) -> None:
    """Raise ConfigError unless there is a folder."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run folder (runs/NAME) or an HF model folder.")


def read_recipe(path: Path, overrides: list[str] | None, quiet: bool = False) -> "Recipe":
    """Read the recipe, print its notes, and refuse what is not built."""
    from echelon.recipe import check_built, load_recipe

    recipe, notes = load_recipe(path, overrides or [])
    check_built(recipe)
    for note in [] if quiet else notes:
        say(redact_text(note))
    return recipe


def parse_nproc(text: str) -> int | None:
    """The number that `--nproc` gives; None for auto. Raises ConfigError."""
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc {text} is neither a number of processes nor auto; use --nproc 2, for example.")
    return int(text)


def parse_hosts(text: str) -> str:
    """The hosts that `--hosts a,b` names, as an override of the recipe. Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--hosts {text!r} names no machine; write it like --hosts a,b.")
    return f"launch.torchrun.hosts={json.dumps(names)}"


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
