"""Names in a recipe as what they stand for: rows of a table, or `package.module:Name` from outside of echelon."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from echelon.errors import ConfigError, first_line


def find_named(key: str, name: str, table: Mapping[str, str]) -> Any:
    """The function or class that a recipe names; its module is imported now.

    Args:
        key: the recipe's, for the message.
        name: one of the table's, or `package.module:Name`.
        table: from names to `package.module:Name`.

    Raises:
        ConfigError: the name is neither, or cannot be imported.
    """
    module, _, attribute = table.get(name, name).partition(":")
    if not attribute:
        known = ", ".join(table)
        raise ConfigError(f"{key}={name}: there is no such name; use {known}, or package.module:Name of your own.")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if name in table:
            raise
        raise ConfigError(
            f"{key}={name}: it cannot be imported ({first_line(error)}); give an installed package, or add its folder "
            "to PYTHONPATH."
        ) from error
