"""`--verbose` and `--quiet`, before and after the name of every command."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from echelon.ground.errors import ConfigError
from echelon.ground.logs import log_to_console

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show debug messages too, each line with its time and logger.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show results, warnings and errors only.")]


def set_verbosity(verbose: bool, quiet: bool) -> None:
    """Set the log level from the options, else from the environment, also for child processes."""
    from echelon.ground.launch_environment import LOG_LEVEL_VARIABLE, find_log_level, find_look
    from echelon.ground.variables import set_variables

    if verbose and quiet:
        raise ConfigError("--verbose and --quiet contradict each other; give one.")
    if verbose or quiet:
        set_variables({LOG_LEVEL_VARIABLE: "debug" if verbose else "warning"})
    level = find_log_level()
    log_to_console(level, look=find_look(sys.stdout, level))


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Add both options to a command; they override those before its name."""
    options = {"verbose": VerboseOption, "quiet": QuietOption}

    @functools.wraps(command)
    def run(*arguments: object, verbose: bool, quiet: bool, **others: object) -> None:
        if verbose or quiet:
            set_verbosity(verbose, quiet)
        command(*arguments, **others)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        for name, option in options.items()
    ]
    signature = inspect.signature(command)
    # typer reads a command's options from its signature.
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **options}
    return run
