"""Keys of SageMaker's model-parallel library (SMP), versions 1 and 2, as keys of the recipe; the degrees come last.

The parameters are in `smp.yaml`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import recipe_keys
from echelon.recipe.training import AxisName
from echelon.recipe.yaml_text import read_table, show_value

Version = Literal[1, 2]

_BOTH: tuple[Version, ...] = (1, 2)

Row = Mapping[str, Any]
"""What `smp.yaml` says about a parameter."""

TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("smp.yaml"))
"""The library's parameters."""

PARALLEL_KEYS: Mapping[str, Sequence[Version]] = TABLE["parallel"]
"""The parameters that become `parallel`, with the versions of the library that have them."""

FIXED: Mapping[str, Row] = TABLE["fixed"]
SETTINGS: Mapping[str, Row] = TABLE["settings"]
_HORIZON, _OFFLOADING = "activation_loading_horizon", "train.activation_offloading"
# Axes of the letters in placement_strategy: data, pipeline and tensor parallelism; the right-most is innermost.
_LETTERS: Mapping[str, tuple[AxisName, ...]] = {"D": ("dp_replicate", "dp_shard", "cp"), "P": ("pp",), "T": ("tp",)}
_PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}
# Their interleaved pipeline prefers backward passes; it has nothing to do with Megatron's, of several stages per rank.
_SCHEDULES = {"interleaved": "1f1b", "simple": "gpipe"}


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


def map_parallel(
    given: Mapping[str, Any], where: str, version: Literal[1, 2], lines: list[str]
) -> dict[str, Any] | None:
    """The mapping `parallel` for parameters of PARALLEL_KEYS, or None without any; adds a line about each to `lines`.

    Raises ConfigError with the parameter whose value is wrong or has no counterpart.
    """
    if not given:
        return None
    mapping = _Mapping(given, where, lines)
    mapping.map_shards(version)
    for name, axis in (("tensor_parallel_degree", "tp"), ("expert_parallel_degree", "ep")):
        mapping.map_degree(name, axis)
    mapping.map_degree("context_parallel_degree", "cp")
    mapping.map_stages()
    mapping.map_pipeline()
    mapping.map_placement()
    mapping.map_optimize()
    return mapping.result


class _Mapping:
    """Reads the parameters one after the other, and notes what each becomes."""

    def __init__(self, given: Mapping[str, Any], where: str, lines: list[str]) -> None:
        self.result: dict[str, Any] = {}
        self._given = given
        self._where = where
        self._lines = lines

    def map_shards(self, version: Literal[1, 2]) -> None:
        """Data parallelism: replicas, shards of everything, or shards of the optimizer state."""
        if version == 2:
            self._map_hybrid_shards()
            return
        degree = self._degree("sharded_data_parallel_degree") or 1
        self.result = {"dp_replicate": "auto"} if degree == 1 else {"dp_replicate": "auto", "dp_shard": degree}
        if "sharded_data_parallel_degree" in self._given:
            self._note("sharded_data_parallel_degree", {} if degree == 1 else self.result)
        if (shards := self._given.get("shard_optimizer_state")) is None:
            return
        if not isinstance(shards, bool):
            raise ConfigError(f"{self._where}.shard_optimizer_state={shards} is neither true nor false.")
        if shards and degree > 1:
            raise ConfigError(
                f"{self._where}.shard_optimizer_state and sharded_data_parallel_degree={degree} exclude each other; "
                "remove one."
            )
        if shards:
            self.result = {"dp_shard": "auto", "reshard_after_forward": False, "reduce_gradients": "last"}
        self._note("shard_optimizer_state", self.result if shards else {})

    def _map_hybrid_shards(self) -> None:
        """Processes that share sequences or experts are among those that share the shards: `dp_shard` times `cp`."""
        degree = self._degree("hybrid_shard_degree", least=0) or 0
        for name, shared in (("context_parallel_degree", "sequences"), ("expert_parallel_degree", "experts")):
            inner = self._degree(name) or 1
            if degree and degree % inner:
                raise ConfigError(
                    f"{self._where}.{name}={inner} does not divide hybrid_shard_degree={degree}, whose processes share "
                    f"the {shared}; use a divisor of it."
                )
        context = self._degree("context_parallel_degree") or 1
        if degree == 0:
            self.result = {"dp_shard": "auto"}
        elif degree == 1:
            self.result = {"dp_replicate": "auto"}
        else:
            self.result = {"dp_replicate": "auto", "dp_shard": degree // context}
        if "hybrid_shard_degree" in self._given:
            self._note("hybrid_shard_degree", self.result)

    def map_degree(self, name: str, axis: str) -> None:
        """A degree that is one of `parallel` as it is."""
        if (degree := self._degree(name)) is not None:
            self._note(name, self._put(axis, degree) if degree > 1 else {})

    def map_stages(self) -> None:
        """The pipeline's degree, which has two names."""
        names = [name for name in ("pipeline_parallel_degree", "partitions") if name in self._given]
        degrees = {name: self._degree(name) for name in names}
        if len(set(degrees.values())) > 1:
            raise ConfigError(
                f"{self._where}.pipeline_parallel_degree={degrees['pipeline_parallel_degree']} and "
                f"partitions={degrees['partitions']} are two names of one degree; remove one."
            )
        for name in names:
            self.map_degree(name, "pp")

    def map_pipeline(self) -> None:
        """Microbatches and their schedule."""
        stages = self.result.get("pp", 1)
        count = self._degree("microbatches")
        if count is not None:
            put = self._put("microbatches", count) if stages > 1 else {}
            self._note(
                "microbatches", put, "without a pipeline they are parts of a batch, as train.micro_batch_size says"
            )
        if (order := self._given.get("pipeline")) is not None:
            schedule = self._choose(
                "pipeline", order, _SCHEDULES, "a schedule without a backward pass is `echelon eval`"
            )
            self._note("pipeline", self._put("schedule", schedule) if stages > 1 else {}, "there is no pipeline")
        self._check_active(stages, count)

    def _check_active(self, stages: int, count: int | None) -> None:
        active, name = self._degree("active_microbatches"), "active_microbatches"
        if active is None:
            return
        if stages == 1:
            self._note(name, {}, "there is no pipeline")
            return
        schedule = self.result.get("schedule", "1f1b")
        most = stages if schedule == "1f1b" else count
        if most is None or active < most:
            fix = f"use {most} or more" if most is not None else "set microbatches"
            raise ConfigError(
                f"{self._where}.{name}={active}: schedule {schedule} has up to {most or 'all'} microbatches in flight; "
                f"{fix}, or remove it."
            )
        self._note(name, {}, f"schedule {schedule} has at most {most} in flight")

    def map_placement(self) -> None:
        """Which processes are neighbours; any order of the three letters is allowed."""
        name, value = "placement_strategy", self._given.get("placement_strategy")
        if value is None:
            return
        letters = _PLACEMENTS.get(value, value) if isinstance(value, str) else ""
        if sorted(letters) != ["D", "P", "T"]:
            raise ConfigError(
                f"{self._where}.{name}={value} must be cluster, spread, or the letters D, P and T in order."
            )
        if self.result.get("pp", 1) == self.result.get("tp", 1) == 1:
            self._note(name, {}, "there is only data parallelism")
        else:
            self._note(name, self._put("order", [axis for letter in letters for axis in _LETTERS[letter]]))

    def map_optimize(self) -> None:
        """With tensor parallelism, `memory` keeps no activations twice, which is sequence parallelism."""
        if (value := self._given.get("optimize")) is None:
            return
        divides = self._choose("optimize", value, {"memory": True, "speed": False}, "remove it")
        has_tensors = self.result.get("tp", 1) > 1
        put = self._put("sequence_parallel", divides) if has_tensors else {}
        self._note("optimize", put, "there is no tensor parallelism")

    def _degree(self, name: str, least: int = 1) -> int | None:
        if (value := self._given.get(name)) is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self._where}.{name}={value} must be a whole number of at least {least}.")
        return value

    def _choose(self, name: str, value: Any, known: Mapping[str, Any], why: str) -> Any:
        if not isinstance(value, str) or value not in known:
            raise ConfigError(f"{self._where}.{name}={value} has no counterpart: use {' or '.join(known)}; {why}.")
        return known[value]

    def _put(self, key: str, value: Any) -> dict[str, Any]:
        self.result[key] = value
        return {key: value}

    def _note(self, name: str, put: Mapping[str, Any], why: str = "") -> None:
        became = ", ".join(f"parallel.{key}={show_value(value)}" for key, value in put.items())
        reason = f"no change, {why}" if why else "no change"
        shown = f"{self._where}.{name}={show_value(self._given[name])}"
        self._lines.append(f"{shown} -> {became}" if became else f"{shown}: {reason}")
