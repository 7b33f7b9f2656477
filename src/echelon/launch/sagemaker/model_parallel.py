"""Translate parameters of SageMaker's model parallel library, versions 1 and 2, to recipe keys.

Sources: the library's reference in the SageMaker developer guide (v2.8.0), and `smdistributed_modelparallel` in the
SDK's documentation (v1.15).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from echelon.errors import ConfigError
from echelon.recipe import Recipe
from echelon.recipe.unbuilt import UNBUILT

Version = Literal["v1", "v2"]

_DEGREES: dict[str, tuple[Version, str]] = {
    "hybrid_shard_degree": ("v2", "dp_shard"),
    "tensor_parallel_degree": ("v2", "tp"),
    "context_parallel_degree": ("v2", "cp"),
    "expert_parallel_degree": ("v2", "ep"),
    "sharded_data_parallel_degree": ("v1", "dp_shard"),
    "pipeline_parallel_degree": ("v1", "pp"),
    "partitions": ("v1", "pp"),
}
# Parameters of both versions.
_SHARED = frozenset({"tensor_parallel_degree", "activation_loading_horizon"})


@dataclass(frozen=True)
class _Other:
    """A parameter that is not a degree.

    `same`: accepted values, which match what echelon does (`why`). `fix`: the fix for every other value.
    """

    version: Version
    same: tuple[Any, ...]
    why: str
    fix: str


_PIPELINE = "it belongs to the pipeline, which echelon does not have"
_OTHERS: dict[str, _Other] = {
    "activation_loading_horizon": _Other(
        "v2", (1,), "activations come back one layer ahead", "activations come back one layer ahead; remove it"
    ),
    "fsdp_cache_flush_warnings": _Other("v2", (True, False), "it controls warnings of the library", ""),
    "allow_empty_shards": _Other("v2", (True, False), "shards may always be empty", ""),
    "ddp": _Other("v1", (True,), "gradients are averaged over replicas", "leave it true, or remove it"),
    "horovod": _Other("v1", (False,), "Horovod is not used", "it is for TensorFlow; remove it"),
    "ddp_dist_backend": _Other("v1", ("auto", "nccl"), "NCCL on GPUs", "echelon uses NCCL on GPUs; remove it"),
    "ddp_port": _Other("v1", (), "", "echelon's rendezvous has its own port; remove it"),
    "microbatches": _Other("v1", (1,), "there is no pipeline", f"{_PIPELINE}; set train.micro_batch_size"),
    "active_microbatches": _Other("v1", (), "", f"{_PIPELINE}; remove it"),
    "pipeline": _Other("v1", ("interleaved",), "there is no pipeline", f"{_PIPELINE}; remove it"),
    "optimize": _Other("v1", ("memory",), "there is no pipeline", f"{_PIPELINE}; remove it"),
    "placement_strategy": _Other(
        "v1", ("cluster", "DPT"), "shards are adjacent within a machine", "echelon puts dp_shard inside "
        "dp_replicate, which is cluster; remove it",
    ),
    "auto_partition": _Other("v1", (True,), "there is no pipeline", f"{_PIPELINE}; remove it"),
    "default_partition": _Other("v1", (0,), "there is no pipeline", f"{_PIPELINE}; remove it"),
    "memory_weight": _Other("v1", (), "", f"{_PIPELINE}; remove it"),
    "load_partition": _Other("v1", (False,), "there is no pipeline", f"{_PIPELINE}; remove it"),
    "partition_file": _Other("v1", (), "", f"{_PIPELINE}; remove it"),
    "deterministic_server": _Other("v1", (False,), "there is no pipeline", "set train.deterministic=true instead"),
    "contiguous": _Other("v1", (True,), "there is no pipeline", "it is for TensorFlow; remove it"),
    "prescaled_batch": _Other("v1", (False,), "each rank reads its own batch", f"{_PIPELINE}; remove it"),
    "skip_tracing": _Other("v1", (True, False), "nothing is traced", ""),
    "fp16_params": _Other("v1", (False,), "master weights are fp32", "set train.precision=fp16 instead"),
    "sdp_reduce_bucket_size": _Other(
        "v1", (500_000_000,), "it is the default", "fully_shard has no such setting; remove it"
    ),
    "sdp_param_persistence_threshold": _Other(
        "v1", (1_000_000,), "it is the default", "every parameter is sharded; remove it"
    ),
    "sdp_max_live_parameters": _Other(
        "v1", (1_000_000_000,), "it is the default", "one layer is gathered ahead, whatever its size; remove it"
    ),
    "sdp_hierarchical_allgather": _Other("v1", (True, False), "NCCL chooses its own algorithm", ""),
}  # fmt: skip
# parameter: its version, its recipe key, and the key's value for true; None: the parameter's own value
_SETTINGS: dict[str, tuple[Version, str, Any]] = {
    "random_seed": ("v2", "run.seed", None),
    "sm_activation_offloading": ("v2", "train.activation_offloading", True),
    "offload_activations": ("v1", "train.activation_offloading", True),
    "sdp_gradient_clipping": ("v1", "optim.max_grad_norm", None),
    "fp16": ("v1", "train.precision", "fp16"),
    "bf16": ("v1", "train.precision", "bf16"),
    "shard_optimizer_state": ("v1", "parallel", "zero1"),
}


def map_parameters(
    recipe: Recipe, key: str, parameters: Any, version: Version, world: int, lines: list[str]
) -> dict[str, Any]:
    """Map the parameters to dotted recipe keys for `world` processes; adds a line about each to `lines`.

    Raises ConfigError with the parameter that is unknown, has no equivalent, or is not implemented.
    """
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"{key}={parameters} must be a mapping such as {{hybrid_shard_degree: 8}}.")
    changes: dict[str, Any] = {}
    degrees: dict[str, int] = {}
    for name, value in parameters.items():
        _check_version(key, name, version)
        if name in _DEGREES:
            degrees[name] = _read_degree(key, name, value)
        elif name in _OTHERS:
            lines.append(_accept(f"{key}.{name}", _OTHERS[name], value))
        else:
            for target, wanted in _set(recipe, f"{key}.{name}", _SETTINGS[name], value, lines).items():
                if changes.setdefault(target, wanted) != wanted:
                    raise ConfigError(
                        f"{key}.{name} sets {target}={wanted}, but another parameter sets "
                        f"{target}={changes[target]}; remove one."
                    )
    plan = _plan(key, degrees, version, world, lines)
    if plan is None:
        return changes
    if recipe.parallel != "auto":
        raise ConfigError(f"parallel and {key} both set the parallel plan; remove one.")
    if "parallel" in changes and plan != "ddp":
        raise ConfigError(f"{key}.shard_optimizer_state and a sharded or parallel degree exclude each other.")
    return {"parallel": plan, **changes}


def _check_version(key: str, name: str, version: Version) -> None:
    known: dict[str, Version] = {each: other.version for each, other in _OTHERS.items()}
    known |= {each: row[0] for each, row in _DEGREES.items()} | {each: row[0] for each, row in _SETTINGS.items()}
    if name not in known:
        raise ConfigError(f"{key}.{name} is not a known parameter of SageMaker's model parallel library.")
    if name not in _SHARED and known[name] != version:
        launcher = "mpi" if known[name] == "v1" else "torch_distributed"
        raise ConfigError(
            f"{key}.{name} belongs to version {known[name][1:]} of the library, which runs under {launcher}; remove "
            f"it, or use {launcher}."
        )


def _read_degree(key: str, name: str, value: Any) -> int:
    least = 0 if name == "hybrid_shard_degree" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}.{name}={value} must be a whole number of at least {least}.")
    axis = f"parallel.{_DEGREES[name][1]}"
    row = next((row for row in UNBUILT if row.key == axis), None)
    if value > 1 and row is not None:
        raise ConfigError(f"{key}.{name}={value} is {axis}={value}, which is not built yet; possible: {row.possible}.")
    return value


def _accept(key: str, other: _Other, value: Any) -> str:
    if any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in other.same):
        return f"{key}={_word(value)}: {other.why}"
    raise ConfigError(f"{key}={_word(value)}: {other.fix or 'it must be true or false'}.")


def _set(recipe: Recipe, key: str, row: tuple[Version, str, Any], value: Any, lines: list[str]) -> dict[str, Any]:
    _, target, meaning = row
    if meaning is not None:
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value} is neither true nor false.")
        if not value:
            lines.append(f"{key}=false: no change")
            return {}
        value = meaning
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value} must be a number.")
    section, _, name = target.partition(".")
    owner = getattr(recipe, section)
    given = getattr(owner, name) if name else owner
    default = type(owner).model_fields[name].default if name else "auto"
    if given not in (default, value):
        raise ConfigError(f"{key} sets {target}={value}, but the recipe has {target}={given}; remove one.")
    lines.append(f"{key} -> {target}={value}")
    return {target: value}


def _plan(
    key: str, degrees: Mapping[str, int], version: Version, world: int, lines: list[str]
) -> str | dict[str, Any] | None:
    """The value of `parallel` for the degrees; None if no degree is given."""
    if not degrees:
        return None
    axes: dict[str, int] = {}
    for name, value in degrees.items():
        axes[_DEGREES[name][1]] = max(value, axes.get(_DEGREES[name][1], 0))
    shard = axes.pop("dp_shard", 0 if version == "v2" else 1)
    others = {axis: value for axis, value in axes.items() if value > 1}
    inner = 1
    for axis, value in others.items():
        inner *= 1 if axis == "ep" else value  # experts divide the shards
    if world % (max(shard, 1) * inner):
        raise ConfigError(
            f"{key}: degrees of {max(shard, 1)} and {inner} do not divide the {world} processes of the job; use "
            "degrees whose product does."
        )
    plan = _choose_parallel(shard, others, world // inner)
    shown = ", ".join(f"{name}={value}" for name, value in degrees.items())
    lines.append(f"{key}: {shown} -> parallel={plan if isinstance(plan, str) else _show(plan)}")
    return plan


def _choose_parallel(shard: int, others: Mapping[str, int], num_data_ranks: int) -> str | dict[str, Any]:
    """The value of `parallel` for a number of shards, 0 for the maximum, and the degrees of the other axes."""
    if others:
        replicas = {} if shard == 0 else {"dp_replicate": num_data_ranks // shard}
        return {"dp_shard": shard or "auto", **replicas, **others}
    if shard == 1:
        return "ddp"
    if shard in (0, num_data_ranks):
        return "fsdp"
    return {"dp_replicate": num_data_ranks // shard, "dp_shard": shard}


def _show(plan: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in plan.items()) + "}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
