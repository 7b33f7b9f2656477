"""`--verbose`, `--quiet` and `--json`, before and after the name of every command."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from echelon.cli.commands.failure import wants_json
from echelon.cli.commands.terminal import log_to_stderr
from echelon.ground.errors import ConfigError
from echelon.ground.logs import log_to_console

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show debug messages too, each line with its time and logger.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show results, warnings and errors only.")]
JsonErrorsOption = Annotated[bool, typer.Option("--json", help="Print errors as JSON, and log to stderr.")]


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


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command; they override those before its name.

    A command that has a result as JSON has its own `--json`, as the parameter `as_json`.
    """
    signature = inspect.signature(command)
    has_json = "as_json" in signature.parameters
    options = {"verbose": VerboseOption, "quiet": QuietOption} | ({} if has_json else {"as_json": JsonErrorsOption})

    @functools.wraps(command)
    def run(*arguments: object, verbose: bool, quiet: bool, as_json: bool, **others: object) -> None:
        if verbose or quiet:
            set_verbosity(verbose, quiet)
        if as_json := as_json or wants_json():
            log_to_stderr()
        command(*arguments, **others, **({"as_json": as_json} if has_json else {}))

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        for name, option in options.items()
    ]
    # typer reads a command's options from its signature.
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **options}
    return run
