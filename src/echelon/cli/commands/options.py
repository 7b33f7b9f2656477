"""Makes a command of a function: the parameters become arguments and options, and the docstring their help."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.models import OptionInfo, ParameterInfo

from echelon.cli.commands.terminal import log_to_stderr, wants_json
from echelon.ground.errors import ConfigError
from echelon.ground.logs import log_to_console

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show debug messages too, each line with its time and logger.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show results, warnings and errors only.")]
JsonErrorsOption = Annotated[bool, typer.Option("--json", help="Print errors as JSON, and log to stderr.")]
_COMMON = {"verbose": VerboseOption, "quiet": QuietOption, "as_json": JsonErrorsOption}
_ENTRY = re.compile(r"^    (\w+): (.+(?:\n     +.+)*)", re.MULTILINE)
_SECTIONS = re.compile(r"\n\n(?:Args|Returns|Raises):\n")


@dataclass(frozen=True)
class OptionsOf:
    """In the annotation of `**options`: the command also takes the optional parameters of these functions.

    Attributes:
        places: the functions, as `module:name` below echelon.cli.api; imported when the command runs or shows its help.
        without: parameters of these functions that are no options.
    """

    places: Sequence[str]
    without: Sequence[str] = ()


def read_docstring(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """The text above the sections of a docstring, and the help of each parameter that has a line below `Args:`.

    In the help a parameter in backticks is written as its option.
    """
    whole = inspect.getdoc(function) or ""
    names = inspect.signature(function).parameters

    def write(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}" if found[1] in names else found[1]

    helps: dict[str, str] = {}
    for name, lines in _ENTRY.findall(whole):
        if name in names:
            words = re.sub("`([^`]+)`", write, " ".join(lines.split()))
            helps[name] = words if lines[0] == "`" else words[0].upper() + words[1:]
    return _SECTIONS.split(whole)[0], helps


def find_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a command, as typer reads them.

    A keyword parameter is an option, any other one an argument; `Annotated[..., typer.Option(...)]` gives what differs:
    other names, a metavar, limits, the help of an option of several commands.
    """
    parameters: dict[str, inspect.Parameter] = {}
    helps = read_docstring(function)[1]
    for name, parameter in inspect.signature(function).parameters.items():
        is_marked = get_origin(parameter.annotation) is Annotated
        kind, *marks = get_args(parameter.annotation) if is_marked else (parameter.annotation,)
        if parameter.kind is parameter.VAR_KEYWORD:
            parameters |= {other: value for other, value in _find_added(marks[0]).items() if other not in parameters}
            continue
        fresh = typer.Option() if parameter.kind is parameter.KEYWORD_ONLY else typer.Argument()
        mark = copy(next((mark for mark in marks if isinstance(mark, ParameterInfo)), fresh))
        mark.help = helps.get(name, mark.help)
        if isinstance(mark, OptionInfo) and mark.default is ...:  # no name is given
            mark.param_decls = (f"--{name.replace('_', '-')}",)
        annotation = Annotated[_find_type(kind, parameter.default), mark]  # type: ignore[valid-type]
        parameters[name] = parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=annotation)
    return parameters


def _find_added(mark: OptionsOf) -> dict[str, inspect.Parameter]:
    """The optional parameters of the functions of `mark`; the first function that has one counts."""
    parameters: dict[str, inspect.Parameter] = {}
    for module, _, name in (place.partition(":") for place in mark.places):
        taken = find_parameters(getattr(import_module(f"echelon.cli.api.{module}"), name))
        parameters = taken | parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name not in mark.without and parameter.default is not parameter.empty
    }


def _find_type(kind: Any, default: object) -> Any:
    """The type of a word of the command line, for a parameter with this type: a path or the first one, of several."""
    if default == ():
        return list[str]
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if len(parts) <= 2 and Path not in parts:
        return kind
    chosen = Path if Path in parts else parts[0]
    return chosen | None if type(None) in parts else chosen


def select(options: Mapping[str, Any], function: Callable[..., object]) -> dict[str, Any]:
    """Those of the options of a command that the function takes."""
    return {name: options[name] for name in inspect.signature(function).parameters if name in options}


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


def make_command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a command for typer, with `--verbose`, `--quiet` and `--json`, which win over those before its
    name.

    A command that has a result as JSON has its own `--json`, as the parameter `as_json`.
    """
    parameters = find_parameters(function)
    has_json = "as_json" in parameters

    @functools.wraps(function)
    def run(*, verbose: bool, quiet: bool, as_json: bool, **given: object) -> None:
        if verbose or quiet:
            set_verbosity(verbose, quiet)
        if as_json := as_json or wants_json():
            log_to_stderr()
        function(**given, **({"as_json": as_json} if has_json else {}))

    for name, option in _COMMON.items():
        common = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        parameters.setdefault(name, common)
    run.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__doc__ = read_docstring(function)[0]
    return run
