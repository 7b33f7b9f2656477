"""Parts by name: entry points of the groups `echelon.launchers`, `echelon.engines` and so on.

An entry point is a row in the metadata of an installed package: a name, and the `package.module:Name` that it stands
for, which is imported when it is used. echelon registers its own parts as others do, in its pyproject.toml.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from echelon.ground.errors import ConfigError, first_line
from echelon.ground.extensions import import_place
from echelon.ground.stored import read_text

OWN = "echelon"
"""The distribution whose names are echelon's own, and the beginning of all groups."""

Part = TypeVar("Part", covariant=True)


@cache
def read_own() -> Mapping[str, Mapping[str, str]]:
    """echelon's own rows: `package.module:Name` by group and name. Raises ConfigError if there are none.

    Those of a checkout are read from its pyproject.toml: its installation may be older, or none.
    """
    root = Path(__file__).parents[3]
    if (root / "src" / OWN) == Path(__file__).parents[1] and (root / "pyproject.toml").is_file():
        import tomllib

        project = tomllib.loads(read_text(root / "pyproject.toml"))["project"]
        return {**project["entry-points"], "console_scripts": project["scripts"]}
    found = next((rows for owner, rows in read_installed() if owner.partition(" ")[0] == OWN), {})
    if f"{OWN}.engines" not in found:
        raise ConfigError(
            f"the metadata of {OWN} is not installed, which names its engines, launchers and so on; install echelon "
            "with pip, or run it from a checkout."
        )
    return found


def read_installed() -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Each installed distribution with rows for echelon: its name and version, and its rows by group and name.

    What lies in the current folder is not installed: metadata there would add code to every command.
    """
    from importlib.metadata import distributions

    seen, here = set[str](), Path.cwd().resolve()
    for installed in distributions():
        rows: dict[str, dict[str, str]] = {}
        for entry in installed.entry_points:
            rows.setdefault(entry.group, {})[entry.name] = entry.value
        if not any(group.startswith(f"{OWN}.") for group in rows):
            continue
        name = re.sub(r"[-_.]+", "-", installed.metadata["Name"]).lower()
        if name in seen or Path(str(installed.locate_file(""))).resolve() == here:
            continue
        seen.add(name)
        yield f"{name} {installed.version}", rows


@cache
def read_others() -> Mapping[tuple[str, str], list[tuple[str, str]]]:
    """The rows of other distributions: owner and `package.module:Name` by group and name."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for owner, groups in read_installed():
        if owner.partition(" ")[0] != OWN:
            for group, rows in groups.items():
                for name, place in rows.items():
                    found.setdefault((group, name), []).append((owner, place))
    return found


class Plugins(Mapping[str, Part]):
    """The parts of one kind by name: echelon's own in alphabetical order, then those of other packages."""

    def __init__(self, kind: str, key: str) -> None:
        """`kind`: their plural, the end of the group's name. `key`: the recipe key that names one, for messages."""
        self._group, self._key = f"{OWN}.{kind}", key
        self.loaded: dict[str, Any] = {}
        """The parts that were imported, by name."""

    @property
    def own(self) -> tuple[str, ...]:
        """The names of echelon's own parts."""
        return tuple(sorted(read_own().get(self._group, {})))

    @override
    def __iter__(self) -> Iterator[str]:
        others = sorted(name for group, name in read_others() if group == self._group)
        return iter(dict.fromkeys((*self.own, *others, *self.loaded)))

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
        found: Part = self.loaded[name]
        return found

    def _load(self, name: str) -> Any:
        own, others = read_own().get(self._group, {}).get(name), read_others().get((self._group, name), [])
        shown, owners = f"{self._key}={name}", " and ".join(owner for owner, _ in others)
        if own is not None and others:
            raise ConfigError(f"{shown} is echelon's own name, and {owners} registers it too; uninstall that package.")
        if own is not None:
            return import_place(own)
        if not others:
            raise ConfigError(
                f"{shown}: unknown name; use {', '.join(self)}, or install the package that registers it."
            )
        if len(others) > 1:
            raise ConfigError(f"{shown} is registered by {owners}; uninstall all but one of these packages.")
        [(owner, place)] = others
        try:
            return import_place(place)
        except Exception as error:  # it is the code of another package
            raise ConfigError(
                f"{shown}: {place}, which {owner} registers, cannot be imported ({type(error).__name__}: "
                f"{first_line(error)}); repair or uninstall that package."
            ) from error
