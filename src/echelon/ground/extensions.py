"""Resolve names in a recipe: rows of a table, or extensions `package.module:Name` from outside of echelon.

An extension is code that the recipe's author chose to run, as in a script. Nothing is called before it is known to be a
class with the methods of its kind, or a function with the parameters of its kind: a name such as `os:system` in a
stranger's run folder has no effect.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from echelon.ground.errors import ConfigError, first_line

EXTENSION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The spelling of an extension's name."""


def is_extension(name: str) -> bool:
    """Whether a name in a recipe is that of an extension."""
    return ":" in name


def find_from_here(names: Iterable[str]) -> None:
    """Make modules in the current folder importable if one of the names is an extension.

    For commands that read the user's own recipe, before importing any extension.
    """
    folder = str(Path.cwd())
    if any(is_extension(name) for name in names) and folder not in sys.path:
        sys.path.append(folder)


def find_named(key: str, name: str, table: Mapping[str, Any], kind: type | None = None) -> Any:
    """Import the function or class that a recipe names.

    Args:
        key: the recipe key, for messages.
        name: a name in the table, or `package.module:Name`.
        table: maps names to `package.module:Name`, or is of plugins, whose parts it imports.
        kind: a protocol or class whose methods an extension must have; None: no check.

    Raises:
        ConfigError: the name is neither, cannot be imported, or is of another kind.
    """
    if name in table:
        value = table[name]
        if isinstance(value, str):
            return resolve_name(value)
    elif EXTENSION.fullmatch(name):
        value = _import_outside(key, name, *name.split(":"))
    else:
        raise ConfigError(f"{key}={name}: unknown name; use {', '.join(table)}, or your own package.module:Name.")
    if kind is not None:
        _check_kind(key, name, value, kind)
    return value


def _import_outside(key: str, name: str, module: str, attribute: str) -> Any:
    if module == "__main__":
        raise ConfigError(
            f"{key}={name}: training processes cannot import what is defined in a script or notebook; move it to a "
            f"separate file, such as my_parts.py, and use my_parts:{attribute}."
        )
    try:
        imported = import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}={name}: {module} cannot be imported on this machine ({first_line(error)}); install its package, or "
            "add its folder to PYTHONPATH."
        ) from error
    if not hasattr(imported, attribute):
        raise ConfigError(f"{key}={name}: the module {module} has no {attribute}; correct the name.")
    return getattr(imported, attribute)


def _check_kind(key: str, name: str, found: Any, kind: type) -> None:
    if not isinstance(found, type):
        lacks = f"is a {type(found).__name__}"
    elif missing := _missing_methods(found, kind):
        of_torch = any(base.__module__.startswith("torch.optim") for base in found.__mro__)
        lacks = "is one of torch.optim, which are not accepted" if of_torch else f"has no {missing[0]}()"
    else:
        return
    methods = sorted(getattr(kind, "__abstractmethods__", ())) or _public_methods(kind)
    raise ConfigError(
        f"{key}={name}: it must be a class with {', '.join(methods)}, like echelon's {kind.__name__}, but it {lacks}; "
        "use such a class."
    )


def _missing_methods(found: type, kind: type) -> list[str]:
    """The methods of a kind that a class does not define; a class derived from the kind inherits its defaults."""
    if kind in found.__mro__:
        return sorted(getattr(found, "__abstractmethods__", ()))
    return [name for name in _public_methods(kind) if not callable(getattr(found, name, None))]


def _public_methods(kind: type) -> list[str]:
    return [name for name, member in vars(kind).items() if inspect.isfunction(member) and not name.startswith("_")]


def build_named(
    key: str, name: str, table: Mapping[str, Any], kind: type, *arguments: Any, options: Mapping[str, Any] | None = None
) -> Any:
    """Build what a recipe names from arguments and options. Raises ConfigError as `find_named` and `check_options`."""
    found = find_named(key, name, table, kind)
    check_options(key, name, found, len(arguments), options)
    try:
        return found(*arguments, **(options or {}))
    except (TypeError, ValueError) as error:
        if not is_extension(name):
            raise
        raise ConfigError(f"{key}={name}: it cannot be built: {first_line(error)}; see {_options_key(key)}.") from error


def check_parameters(key: str, name: str, found: Any, first: tuple[str, ...], kind: str, fix: str) -> None:
    """Raise ConfigError unless the parameters of a function begin with `first`. `kind`: what it is, such as a loss."""
    given = tuple(inspect.signature(found).parameters)
    if given[: len(first)] != first:
        wanted = f"{kind} is a function of ({', '.join(first)}) and its options"
        raise ConfigError(f"{key}={name}: it is a function of ({', '.join(given)}), and {wanted}; {fix}.")


def check_options(key: str, name: str, found: Any, num_arguments: int, options: Mapping[str, Any] | None) -> None:
    """Raise ConfigError unless `found` can be called with this number of arguments and these options."""
    try:
        inspect.signature(found).bind(*[None] * num_arguments, **(options or {}))
    except TypeError as error:
        given = f", of which echelon passes the first {num_arguments}" if num_arguments else ""
        raise ConfigError(
            f"{_options_key(key)}={dict(options or {})} does not fit {name}{inspect.signature(found)}{given} "
            f"({error}); correct the options."
        ) from error


def _options_key(key: str) -> str:
    return f"{key.rpartition('.')[0]}.options"
