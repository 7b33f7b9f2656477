"""Names in a recipe as what they stand for: rows of a table, or `package.module:Name` from outside of echelon.

Code that a recipe names is code that its author chose to run, as in a script. Nothing is called before it has been
found to be a class with the methods of its kind: a name such as `os:system` in a stranger's run folder does nothing.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError, first_line

EXTENSION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The spelling of a name from outside."""


def is_extension(name: str) -> bool:
    """Whether a recipe's name is one from outside of echelon."""
    return ":" in name


def find_from_here(names: Iterable[str]) -> None:
    """Let modules of the current folder be imported, if one of the names is from outside of echelon.

    For commands that read a recipe of the user's own, before anything is imported for it.
    """
    here = str(Path.cwd())
    if any(is_extension(name) for name in names) and here not in sys.path:
        sys.path.append(here)


def find_named(key: str, name: str, table: Mapping[str, str], kind: type | None = None) -> Any:
    """The function or class that a recipe names; its module is imported now.

    Args:
        key: the recipe's, for the message.
        name: one of the table's, or `package.module:Name`.
        table: from names to `package.module:Name`.
        kind: a protocol or class, whose methods a class from outside must have; None: it is not looked at.

    Raises:
        ConfigError: the name is neither, cannot be imported, or is of another kind.
    """
    module, _, attribute = table.get(name, name).partition(":")
    if name in table:
        return getattr(import_module(module), attribute)
    if not EXTENSION.fullmatch(name):
        raise ConfigError(
            f"{key}={name}: there is no such name; use {', '.join(table)}, or package.module:Name of your own."
        )
    found = _import_outside(key, name, module, attribute)
    if kind is not None:
        _check_kind(key, name, found, kind)
    return found


def _import_outside(key: str, name: str, module: str, attribute: str) -> Any:
    if module == "__main__":
        raise ConfigError(
            f"{key}={name}: what a script or a notebook defines itself cannot be imported by the processes that train; "
            "put it into a file of its own, such as my_parts.py, and name my_parts:" + attribute + "."
        )
    try:
        imported = import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}={name}: {module} cannot be imported on this machine ({first_line(error)}); install its package, or "
            "add the folder that holds it to PYTHONPATH."
        ) from error
    if not hasattr(imported, attribute):
        raise ConfigError(f"{key}={name}: the module {module} has no {attribute}; correct the name.")
    return getattr(imported, attribute)


def _check_kind(key: str, name: str, found: Any, kind: type) -> None:
    methods = list_methods(kind)
    missing = [each for each in methods if not callable(getattr(found, each, None))]
    if not isinstance(found, type) or missing:
        lacks = f"has no {missing[0]}()" if isinstance(found, type) else f"is a {type(found).__name__}"
        raise ConfigError(
            f"{key}={name}: it must be a class with {', '.join(methods)}, as echelon's {kind.__name__} has, and it "
            f"{lacks}; name such a class."
        )


def list_methods(kind: type) -> list[str]:
    """The public methods of a protocol, or those that an abstract class leaves open."""
    if abstract := getattr(kind, "__abstractmethods__", ()):
        return sorted(abstract)
    return [name for name, each in vars(kind).items() if inspect.isfunction(each) and not name.startswith("_")]


def build_named(
    key: str,
    name: str,
    table: Mapping[str, str],
    kind: type,
    *arguments: Any,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """What a recipe names, made: called with the arguments of its kind, and with the recipe's options by their names.

    Raises ConfigError as `find_named`, and for options that it does not take.
    """
    found = find_named(key, name, table, kind)
    check_options(key, name, found, len(arguments), options)
    try:
        return found(*arguments, **(options or {}))
    except (TypeError, ValueError) as error:
        if not is_extension(name):
            raise
        raise ConfigError(f"{key}={name}: it cannot be made: {first_line(error)}; see {_options_key(key)}.") from error


def check_options(key: str, name: str, found: Any, num_arguments: int, options: Mapping[str, Any] | None) -> None:
    """Raise ConfigError unless what was found can be called with so many arguments and these options."""
    try:
        inspect.signature(found).bind(*[None] * num_arguments, **(options or {}))
    except TypeError as error:
        given = f", of which echelon gives the first {num_arguments}" if num_arguments else ""
        raise ConfigError(
            f"{_options_key(key)}={dict(options or {})} does not fit {name}{inspect.signature(found)}{given} "
            f"({error}); correct the options."
        ) from error


def _options_key(key: str) -> str:
    return f"{key.rpartition('.')[0]}.options"
