"""Keys of SageMaker's model-parallel library (SMP), versions 1 and 2, as keys of the recipe.

The parameters are in `smp.yaml`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from echelon.foreign.smp_degrees import PARALLEL_KEYS, TABLE, map_parallel
from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import recipe_keys
from echelon.recipe.yaml_text import show_value

Version = Literal[1, 2]

_BOTH: tuple[Version, ...] = (1, 2)


Row = Mapping[str, Any]
"""What `smp.yaml` says about a parameter."""

FIXED: Mapping[str, Row] = TABLE["fixed"]
SETTINGS: Mapping[str, Row] = TABLE["settings"]
_HORIZON, _OFFLOADING = "activation_loading_horizon", "train.activation_offloading"


@dataclass(frozen=True)
class Mapped:
    """The result: values of dotted recipe keys, the parameters that set each, and a line about each parameter."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    lines: tuple[str, ...]


def map_smp(parameters: Any, where: str, version: Version | None = None) -> Mapped:
    """Map parameters of the library to keys of the recipe.

    Args:
        parameters: a mapping, as in the SDK.
        where: the recipe key under which they are given, for messages.
        version: that of the library; None tells it by the parameters.

    Raises:
        ConfigError: a parameter is unknown, belongs to another version, or has no counterpart; with its name.
    """
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"{where}={parameters} must be a mapping such as {{hybrid_shard_degree: 8}}.")
    resolved_version = _check_names(parameters, where, version)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    lines: list[str] = []

    def add(names: str, key: str, value: Any) -> None:
        if values.setdefault(key, value) != value:
            raise ConfigError(
                f"{where}.{names} sets {key}={show_value(value)}, but {where}.{sources[key]} sets "
                f"{key}={show_value(values[key])}; remove one."
            )
        sources.setdefault(key, names)

    for name, value in parameters.items():
        if name in FIXED:
            lines.append(_accept(f"{where}.{name}", FIXED[name], value))
        elif name in SETTINGS:
            for key, meaning in _read_setting(f"{where}.{name}", SETTINGS[name], value, lines):
                add(name, key, meaning)
    if _HORIZON in parameters:
        offloads = _OFFLOADING in values
        ahead = _read_horizon(f"{where}.{_HORIZON}", parameters[_HORIZON], resolved_version, offloads, lines)
        values |= {_OFFLOADING: ahead} if offloads else {}
    degrees = {name: value for name, value in parameters.items() if name in PARALLEL_KEYS}
    if (parallel := map_parallel(degrees, where, resolved_version, lines)) is not None:
        add(", ".join(degrees), "parallel", parallel)
    return Mapped(values, sources, tuple(lines))


def apply_smp(draft: Draft, mapped: Mapped, where: str) -> None:
    """Set the mapped keys in a draft. Raises ConfigError if it already sets one of them otherwise."""
    fields = recipe_keys(Recipe)
    for key, value in mapped.values.items():
        path, default = tuple(key.split(".")), fields[key].get_default(call_default_factory=True)
        current = draft.get(path)
        if current not in (None, default, value):
            raise ConfigError(
                f"{where}.{mapped.sources[key]} sets {key}={show_value(value)}, but the recipe has "
                f"{key}={show_value(current)}; remove one."
            )
        draft.set(path, value, where)


def expand_smp(draft: Draft) -> list[str]:
    """Replace `engine: smp` and the section `smp` by the keys that they stand for; return a line for each parameter."""
    parameters, engine = draft.get(("smp",)), draft.get(("engine",))
    if engine != "smp":
        if parameters:
            raise ConfigError(
                f"{draft.origin(('smp',))}: smp has parameters of SageMaker's model-parallel library, but engine is "
                f"{engine or 'native'}; set engine: smp, or remove smp."
            )
        return []
    mapped = map_smp(parameters or {}, "smp")
    draft.remove(("smp",))
    apply_smp(draft, mapped, "smp")
    draft.set(("engine",), "native", "smp")
    return ["engine: smp is read as engine: native with SMP's keys in echelon's own spelling.", *mapped.lines]


def _check_names(parameters: Mapping[str, Any], where: str, version: Version | None) -> Version:
    """The version to which all parameters belong; without any that tells, 2."""
    versions = {name: row["versions"] for rows in (FIXED, SETTINGS) for name, row in rows.items()}
    versions |= {_HORIZON: _BOTH, **PARALLEL_KEYS}
    first: str | None = None
    for name in parameters:
        if name not in versions:
            raise ConfigError(f"{where}.{name} is not a known parameter of SageMaker's model parallel library.")
        if version is not None and version not in versions[name]:
            other = versions[name][0]
            if first is None:
                launcher = "mpi" if other == 1 else "torch_distributed"
                raise ConfigError(
                    f"{where}.{name} belongs to version {other} of the library, which runs under {launcher}; remove "
                    f"it, or use {launcher}."
                )
            raise ConfigError(
                f"{where}.{name} belongs to version {other} of the library, and {where}.{first} to version {version}; "
                "use the parameters of one version."
            )
        if version is None and len(versions[name]) == 1:
            first, version = name, versions[name][0]
    return version or 2


def _accept(key: str, row: Row, value: Any) -> str:
    if any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in row["same"]):
        return f"{key}={show_value(value)}: no change, {row['why']}"
    raise ConfigError(f"{key}={show_value(value)}: {row.get('fix', 'it must be true or false')}.")


def _read_setting(key: str, row: Row, value: Any, lines: list[str]) -> Iterator[tuple[str, Any]]:
    if "value" not in row:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key}={value} must be a number.")
        meaning = value
    elif not isinstance(value, bool):
        raise ConfigError(f"{key}={value} is neither true nor false.")
    elif not value:
        lines.append(f"{key}=false: no change")
        return
    else:
        meaning = row["value"]
    lines.append(f"{key}={show_value(value)} -> {row['key']}={show_value(meaning)}")
    yield row["key"], meaning


def _read_horizon(key: str, value: Any, version: Version, offloads: bool, lines: list[str]) -> int | bool:
    """Version 2 counts layers on the GPU at the same time, with the one that runs; version 1 what is loaded ahead."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value} must be a whole number of at least 1.")
    if not offloads:
        lines.append(f"{key}={value}: no change, activations stay on the GPU")
        return False
    ahead = (value - 1 if version == 2 else value) or True
    unit = "" if version == 2 else ", in layers instead of pipeline tasks"
    lines.append(f"{key}={value} -> {_OFFLOADING}={show_value(ahead)}{unit}")
    return ahead
