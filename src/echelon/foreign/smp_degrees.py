"""The degrees and pipeline options of SageMaker's model-parallel library as a mapping `parallel`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from echelon.ground.errors import ConfigError
from echelon.recipe.training import AxisName
from echelon.recipe.yaml_text import read_table, show_value

TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("smp.yaml"))
"""The library's parameters."""

PARALLEL_KEYS: Mapping[str, Sequence[Literal[1, 2]]] = TABLE["parallel"]
"""The parameters that become `parallel`, with the versions of the library that have them."""

# Axes of the letters in placement_strategy: data, pipeline and tensor parallelism; the right-most is innermost.
_LETTERS: Mapping[str, tuple[AxisName, ...]] = {"D": ("dp_replicate", "dp_shard", "cp"), "P": ("pp",), "T": ("tp",)}
_PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}
# Their interleaved pipeline prefers backward passes; it has nothing to do with Megatron's, of several stages per rank.
_SCHEDULES = {"interleaved": "1f1b", "simple": "gpipe"}


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
