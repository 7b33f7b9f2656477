"""Parts by name: entry points of the groups `echelon.launchers`, `echelon.engines` and so on.

An entry point is a row in the metadata of an installed package: a name, and the `package.module:Name` that it stands
for, which is imported when it is used. echelon registers its own parts as others do, in its pyproject.toml.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from typing_extensions import override

from echelon.ground.errors import ConfigError, first_line
from echelon.ground.stored import read_text

Part = TypeVar("Part", covariant=True)
Rows = Mapping[str, Mapping[str, str]]
"""`package.module:Name` by group and name."""


@cache
def read_installed() -> Mapping[str, Rows]:
    """The rows of each installed distribution that has some for echelon, by its name in lower case.

    What lies in the current folder is not installed: metadata there would add code to every command.
    """
    packages: dict[str, Rows] = {}
    for installed in distributions():
        rows: dict[str, dict[str, str]] = {}
        for entry in installed.entry_points:
            rows.setdefault(entry.group, {})[entry.name] = entry.value
        is_for_us = any(group.startswith("echelon.") for group in rows)
        if is_for_us and Path(str(installed.locate_file(""))).resolve() != Path.cwd().resolve():
            packages.setdefault(installed.metadata["Name"].lower(), rows)
    return packages


@cache
def read_own() -> Rows:
    """echelon's own rows; those of a checkout are in its pyproject.toml, since its installation may be older, or none.

    Raises ConfigError if there are none.
    """
    root = Path(__file__).parents[3]
    if (root / "src") == Path(__file__).parents[2] and (root / "pyproject.toml").is_file():
        project = tomllib.loads(read_text(root / "pyproject.toml"))["project"]
        return {**project["entry-points"], "console_scripts": project["scripts"]}
    if "echelon" not in read_installed():
        raise ConfigError(
            "the metadata of echelon is not installed, which names its engines, launchers and so on; install echelon "
            "with pip, or run it from a checkout."
        )
    return read_installed()["echelon"]


class Plugins(Mapping[str, Part]):
    """The parts of one kind by name: echelon's own in alphabetical order, then those of other packages."""

    def __init__(self, kind: str, key: str) -> None:
        """`kind`: their plural, the end of the group's name. `key`: the recipe key that names one, for messages."""
        self._group, self._key = f"echelon.{kind}", key
        self.loaded: dict[str, Any] = {}
        """The parts that were imported, by name."""

    @property
    def own(self) -> tuple[str, ...]:
        """The names of echelon's own parts."""
        return tuple(sorted(read_own().get(self._group, {})))

    def _others(self) -> Iterator[tuple[str, str, str]]:
        """Owner, name and place of each part of another package."""
        for owner, rows in read_installed().items():
            if owner != "echelon":
                yield from ((owner, name, place) for name, place in rows.get(self._group, {}).items())

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.own, *sorted(name for _, name, _ in self._others()), *self.loaded)))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    @override
    def __contains__(self, name: object) -> bool:
        """Whether a part has this name; imports nothing."""
        return name in self.own or any(name == other for other in self)

    @override
    def __getitem__(self, name: str) -> Part:
        """Import a part. Raises ConfigError for a name that no package registers, or two, and for a broken part."""
        if name not in self.loaded:
            self.loaded[name] = self._load(name)
        part: Part = self.loaded[name]
        return part

    def _load(self, name: str) -> Any:
        others = {owner: place for owner, other, place in self._others() if other == name}
        shown, owners = f"{self._key}={name}", " and ".join(others)
        if name in self.own and others:
            raise ConfigError(f"{shown} is echelon's own name, and {owners} registers it too; uninstall that package.")
        if name in self.own:
            return resolve_name(read_own()[self._group][name])
        if not others:
            names = ", ".join(self)
            raise ConfigError(f"{shown}: unknown name; use {names}, or install the package that registers it.")
        if len(others) > 1:
            raise ConfigError(f"{shown} is registered by {owners}; uninstall all but one of these packages.")
        [place] = others.values()
        try:
            return resolve_name(place)
        except Exception as error:  # it is the code of another package
            raise ConfigError(
                f"{shown}: {place}, which {owners} registers, cannot be imported ({type(error).__name__}: "
                f"{first_line(error)}); repair or uninstall that package."
            ) from error
