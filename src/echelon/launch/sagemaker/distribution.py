"""`launch.sagemaker.distribution`: translate the distribution dictionaries of SageMaker's SDK to echelon settings.

Every distribution starts the same processes with echelon's agent; only the plan, the backend and variables differ.
Rules for combinations: sagemaker-python-sdk v2, `fw_utils.validate_distribution`.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from echelon.foreign.smp import Mapped, apply_smp, map_smp
from echelon.ground.errors import ConfigError
from echelon.launch.sagemaker.request_patch import TABLE
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.messages import explain_errors
from echelon.recipe.names import NATIVE
from echelon.recipe.render import recipe_mapping
from echelon.recipe.synchronization import EVERY_STEP, PARAMETER_SERVER

KEY = "launch.sagemaker.distribution"
SMP_KEY = f"{KEY}.smdistributed.modelparallel.parameters"

_NOT_HERE: Mapping[str, str] = TABLE["not_distributions"]
_FIELDS: Mapping[str, Sequence[str]] = TABLE["distributions"]
_FLAT_SMP = "smdistributed_modelparallel"
_ALIASES = {"smdistributed_dataparallel": "smdistributed.dataparallel", "pytorchx": "torch_distributed"}
# Allowed combinations; each entry may also be used alone.
_TOGETHER = (
    {"torch_distributed", "smdistributed.dataparallel"},
    {"torch_distributed", "smdistributed.modelparallel"},
    {"mpi", "smdistributed.modelparallel"},
)


@dataclass(frozen=True)
class Distribution:
    """The result: the changed recipe, variables of the container, and lines for the user about the changes."""

    recipe: Recipe
    env: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def apply_distribution(recipe: Recipe) -> Distribution:
    """Apply `launch.sagemaker.distribution` to the recipe.

    Raises ConfigError with the key of an entry that is unknown, conflicts with another, or has no equivalent.
    """
    changes: dict[str, Any] = {}
    env: dict[str, str] = {}
    lines: list[str] = []
    enabled = _read_enabled(_respell(recipe.launch.sagemaker.distribution, lines))
    for name, settings in enabled.items():
        if options := settings.get("custom_mpi_options"):
            env |= _read_mpi_options(f"{KEY}.{name}.custom_mpi_options", options, lines)
    if "mpi" in enabled:
        changes |= _map_mpi(recipe.launch, enabled["mpi"], lines)
    if "pytorchddp" in enabled:
        changes |= _map_pytorchddp(recipe, lines)
    if "multi_worker_mirrored_strategy" in enabled:
        changes |= _map_mirrored(recipe, lines)
    if "parameter_server" in enabled:
        changes |= _map_parameter_server(recipe, lines)
    if "smdistributed.dataparallel" in enabled:
        # Newest release: 2.6.0 of April 2025, inside the image of SMP v2.8.0.
        lines.append(
            f"{KEY}.smdistributed.dataparallel -> torch_distributed, which trains the same model over NCCL and EFA: "
            "SageMaker's data parallel library (SMDDP) is for PyTorch 2.5 or older, and echelon needs 2.11 or later"
        )
    smp = None
    if "smdistributed.modelparallel" in enabled:
        parameters = enabled["smdistributed.modelparallel"].get("parameters") or {}
        smp = map_smp(parameters, SMP_KEY, 1 if "mpi" in enabled else 2)
        lines += smp.lines
    return Distribution(_change(recipe, changes, smp), env, tuple(lines))


def _respell(distribution: Mapping[str, Any], lines: list[str]) -> Mapping[str, Any]:
    """The entries with the names of the SDK, of those that examples spell otherwise."""
    entries = dict(_nest_smp(distribution, lines))
    for name, target in _ALIASES.items():
        outer, _, inner = target.partition(".")
        if name in entries and outer not in entries:
            settings = entries.pop(name)
            entries[outer] = {inner: settings} if inner else settings
            lines.append(f"{KEY}.{name} -> {target}")
    return entries


def _nest_smp(distribution: Mapping[str, Any], lines: list[str]) -> Mapping[str, Any]:
    """`smdistributed_modelparallel`, as in old examples with its parameters beside `enabled`, as the SDK spells it.

    Its version 1 is started by mpi.
    """
    flat = distribution.get(_FLAT_SMP)
    if not isinstance(flat, Mapping) or "smdistributed" in distribution:
        return distribution
    inner = {name: value for name, value in flat.items() if name not in ("enabled", "parameters")}
    settings = {"enabled": flat.get("enabled", True), "parameters": {**(flat.get("parameters") or {}), **inner}}
    others = {name: value for name, value in distribution.items() if name != _FLAT_SMP}
    launcher = {} if others else {"mpi": {"enabled": settings["enabled"]}}
    lines.append(f"{KEY}.{_FLAT_SMP} -> smdistributed.modelparallel" + (", started by mpi" if launcher else ""))
    return {**others, **launcher, "smdistributed": {"modelparallel": settings}}


def _read_enabled(distribution: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The enabled entries, with the nested ones as `smdistributed.NAME`."""
    flat: dict[str, Any] = {}
    for name, value in distribution.items():
        if name in _NOT_HERE:
            raise ConfigError(f"{KEY}.{name}: {_NOT_HERE[name]}.")
        _check_fields(name, value)
        if name == "smdistributed":
            for strategy, settings in value.items():
                _check_fields(f"{name}.{strategy}", settings)
                flat[f"{name}.{strategy}"] = settings
        else:
            flat[name] = value
    for name, settings in flat.items():
        if not isinstance(settings.get("enabled", False), bool):
            raise ConfigError(f"{KEY}.{name}.enabled={settings['enabled']} is neither true nor false.")
    enabled = {name: settings for name, settings in flat.items() if settings.get("enabled", False)}
    if not enabled:
        raise ConfigError(f"{KEY} has no enabled entry; use torch_distributed: {{enabled: true}}.")
    if len(enabled) > 1 and set(enabled) not in _TOGETHER:
        raise ConfigError(
            f"{KEY}: {' and '.join(enabled)} are both enabled, but a job has one distribution (model parallelism also "
            "needs its launcher); disable the others."
        )
    if set(enabled) == {"smdistributed.modelparallel"}:
        raise ConfigError(
            f"{KEY}.smdistributed.modelparallel also needs its launcher: torch_distributed: {{enabled: true}} for "
            "the parameters of version 2, mpi for those of version 1."
        )
    return enabled


def _check_fields(name: str, value: Any) -> None:
    if name not in _FIELDS:
        names = ", ".join(key for key in _FIELDS if "." not in key)
        raise ConfigError(f"{KEY}.{name} is not a distribution of SageMaker for PyTorch; known: {names}.")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{KEY}.{name}={value} must be a mapping such as {{enabled: true}}.")
    for key in value:
        if key not in _FIELDS[name]:
            raise ConfigError(f"{KEY}.{name}.{key} is unknown; known: {', '.join(_FIELDS[name])}.")


def _read_mpi_options(key: str, options: Any, lines: list[str]) -> dict[str, str]:
    """The variables in `-x NAME=VALUE`; other options of mpirun have no meaning here."""
    try:
        words = shlex.split(options) if isinstance(options, str) else None
    except ValueError:
        words = None
    if words is None:
        raise ConfigError(f"{key}={options!r} is not text with balanced quotes; write it like '-x NCCL_DEBUG=INFO'.")
    variables = {}
    while words:
        word = words.pop(0)
        if word == "-x" and words:
            name, equals, value = words.pop(0).partition("=")
            if equals:
                variables[name] = value
                lines.append(f"{key}: -x {name} became a variable of the container")
        elif word in ("-verbose", "--verbose", "-v"):
            lines.append(f"{key}: {word} is ignored, since mpirun is not used")
        else:
            raise ConfigError(
                f"{key}: {word} is an option of mpirun, but echelon's agent starts echelon's processes; keep "
                "-x NAME=VALUE and remove the rest."
            )
    return variables


def _map_mpi(launch: LaunchConfig, settings: Mapping[str, Any], lines: list[str]) -> dict[str, Any]:
    lines.append(f"{KEY}.mpi: the same processes, started by echelon's agent on each machine")
    count, key = settings.get("processes_per_host"), f"{KEY}.mpi.processes_per_host"
    if count is None:
        return {}
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{key}={count!r} must be a whole number of at least 1.")
    nproc = launch.nproc_per_node
    if nproc not in ("auto", count):
        raise ConfigError(f"{key}={count} contradicts launch.nproc_per_node={nproc}; remove one.")
    lines.append(f"{key}={count} -> launch.nproc_per_node={count}")
    return {"launch.nproc_per_node": count}


def _map_pytorchddp(recipe: Recipe, lines: list[str]) -> dict[str, Any]:
    if recipe.parallel not in ("auto", "ddp"):
        raise ConfigError(
            f"{KEY}.pytorchddp is DDP, and parallel={recipe.parallel} is another strategy; use torch_distributed, "
            "or remove parallel."
        )
    lines.append(f"{KEY}.pytorchddp -> parallel=ddp over NCCL, started by echelon's agent")
    return {"parallel": "ddp"}


def _map_mirrored(recipe: Recipe, lines: list[str]) -> dict[str, Any]:
    name, strategy = f"{KEY}.multi_worker_mirrored_strategy", recipe.tensorflow.strategy
    if recipe.engine not in ("native", "tensorflow"):
        raise ConfigError(f"{name} is TensorFlow's, and engine={recipe.engine} is another one; remove one.")
    if strategy != "multi_worker":
        raise ConfigError(f"{name} contradicts tensorflow.strategy={strategy}; remove one.")
    lines.append(f"{name} -> engine=tensorflow, tensorflow.strategy=multi_worker, started by echelon's agent")
    return {"engine": "tensorflow"}


def _map_parameter_server(recipe: Recipe, lines: list[str]) -> dict[str, Any]:
    name, sync = f"{KEY}.parameter_server", recipe.sync.name
    if recipe.engine != NATIVE:
        raise ConfigError(f"{name} is for engine={NATIVE}, and the recipe has engine={recipe.engine}; remove one.")
    if sync not in (EVERY_STEP, PARAMETER_SERVER):
        raise ConfigError(f"{name} contradicts sync.name={sync}; remove one.")
    lines.append(f"{name} -> sync.name={PARAMETER_SERVER} of the native engine, started by echelon's agent")
    return {"sync.name": PARAMETER_SERVER}


def _change(recipe: Recipe, changes: Mapping[str, Any], smp: Mapped | None) -> Recipe:
    """The recipe with new values at dotted keys. Raises ConfigError if they contradict the rest of it."""
    if not changes and smp is None:
        return recipe
    draft = Draft(recipe_mapping(recipe), {}, KEY)
    for key, value in changes.items():
        draft.set(tuple(key.split(".")), value, KEY)
    if smp is not None:
        apply_smp(draft, smp, SMP_KEY)
    try:
        changed = Recipe.model_validate(draft.data)
    except ValidationError as error:
        raise explain_errors(error, draft) from None
    return changed
