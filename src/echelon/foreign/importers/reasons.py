"""Keys that are not imported, by name: the reason that the user sees, and values without an effect (`keys.yaml`)."""

from collections.abc import Mapping
from pathlib import Path

from echelon.recipe.yaml_text import read_table

_TABLE = read_table(Path(__file__).with_name("keys.yaml"))


def _by_name(fate: str) -> Mapping[str, str]:
    return {name: row["why"] for row in _TABLE[fate] for name in row["keys"].split()}


NEEDLESS = _by_name("needless")
LOST = _by_name("lost")
REFUSED = _by_name("refused")
SETTINGS: tuple[str, ...] = tuple(_TABLE["settings"].split())
"""Prefixes of settings of features that another key enables, and that are refused by that key if unsupported."""

DEFAULTS: Mapping[str, object] = _TABLE["defaults"]
"""Values that have no effect."""

PLUGINS: frozenset[str] = frozenset(_TABLE["plugins"].split())
"""Axolotl plugins that do not change the result."""
