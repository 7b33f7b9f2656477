"""Converts other tools' spellings of recipe keys, with a note, and refuses those without an equivalent.

The spellings are in `aliases.yaml`, and keys of earlier versions of echelon in `former_keys.yaml`: each becomes the
keys that replace it, with a line that names them.
"""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.variables import QUOTE_VARIABLE, find_cache_dir
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import dotted, recipe_keys
from echelon.recipe.section import show_number
from echelon.recipe.yaml_text import KeyPath, read_table, render_inline, show_value

_TABLE = read_table(Path(__file__).with_name("aliases.yaml"))
_NAMES: Mapping[str, str] = _TABLE["names"]
ALIASES: Mapping[str, str] = {name: key for key, names in _NAMES.items() for name in names.split()}
_VALUES: Mapping[str, Mapping[Any, Any]] = _TABLE["values"]
NO_EQUIVALENT: Mapping[str, str] = _TABLE["without_equivalent"]


FREE_MAPPINGS = ("smp",)

Change = Callable[[Any], Mapping[str, Any] | None]
Successor = str | Change
"""The new dotted key, which takes the value as it is; or a function of the value to the new keys with their values. No
keys: the old one is needless; None: this value is not of an earlier version. A text with spaces: why the key is
needless."""

_FORMER: Mapping[str, Mapping[str, Any]] = read_table(Path(__file__).with_name("former_keys.yaml"))
_KINDS = {"a mapping": dict, "a whole number": int, "true or false": bool}
_SAGEMAKER, _KUBERNETES, _POD = "launch.sagemaker", "launch.kubernetes", "launch.kubernetes.pod_patch.spec"


def spellings(key: str) -> tuple[str, ...]:
    """Return the names of a recipe key in other tools."""
    return tuple(_NAMES.get(key, "").split())


def read_value(name: str, value: Any) -> Any:
    """Return the equivalent of a value given under a recipe key or another tool's name for it.

    Unknown values are returned unchanged; None means that the key stays unset.
    """
    return _VALUES.get(name, {}).get(value, value) if isinstance(value, Hashable) else value


@dataclass(frozen=True)
class Translation:
    """The recipe key and value for a key and value of another tool. `value` None: the key stays unset."""

    path: KeyPath
    value: Any
    note: str


def translate(path: KeyPath, value: Any, origin: str) -> Translation | None:
    """Convert another tool's key and value; None if there is nothing to convert, also for unknown keys.

    Raises ConfigError for a key without an equivalent.
    """
    name = dotted(path)
    if path[0] in FREE_MAPPINGS:
        return None
    if reason := NO_EQUIVALENT.get(str(path[-1]) if len(path) <= 2 else name):
        raise ConfigError(f"{origin}: {name} has no equivalent in a recipe: {reason}")
    alias, target = _find_alias(path, value)
    key = target or name
    ours = read_value(key, read_value(alias or key, value))
    if alias in ("datasets", "test_datasets"):
        ours = _translate_datasets(value)
    elif target == "track" and isinstance(ours, str):
        ours = [ours]
    elif alias in ("evals_per_epoch", "saves_per_epoch"):
        ours = value and f"1/{value} epochs"
    if target is None and ours is value:
        return None
    meaning = f"{key} left unset" if ours is None else f"{key}: {show_value(ours)}"
    return Translation(tuple(key.split(".")), ours, f"{origin}: {name}: {show_value(value)} is read as {meaning}.")


def apply_aliases(draft: Draft) -> list[str]:
    """Convert other tools' keys and values in `draft` in place; return a note for each.

    Raises ConfigError if a key is given under two spellings or has no equivalent.
    """
    notes = []
    for path, value in list(_candidates(draft.data)):
        origin = draft.origin(path)
        if (translation := translate(path, value, origin)) is None:
            continue
        draft.remove(path)
        if len(path) == 2 and path[0] not in Recipe.model_fields and draft.get(path[:1]) == {}:
            draft.remove(path[:1])
        if draft.holds(translation.path) and translation.value is not None:
            ours = dotted(translation.path)
            raise ConfigError(
                f"{origin}: {dotted(path)} is another spelling of {ours}, which is also given "
                f"({draft.origin(translation.path)}); keep one."
            )
        if translation.value is not None:
            draft.set(translation.path, translation.value, origin)
        notes.append(translation.note)
    return notes


def _find_alias(path: KeyPath, value: Any) -> tuple[str, str] | tuple[None, None]:
    name, word = dotted(path), str(path[-1])
    # `adapter: lora` and `optim: adamw_torch` have the name of a section here, but a word as their value.
    if name in recipe_keys(Recipe) and (isinstance(value, dict) or name not in ALIASES):
        return None, None
    if name in ALIASES:
        return name, ALIASES[name]
    if len(path) == 2 and ALIASES.get(word, "").startswith(f"{path[0]}."):
        return word, ALIASES[word]
    return None, None


def _candidates(data: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Any]]:
    # A word given for a section comes first: `adapter: lora` creates the section that `lora_r: 8` belongs to.
    for key, value in sorted(data.items(), key=lambda item: item[0] not in Recipe.model_fields):
        if isinstance(value, dict):
            yield from (((key, inner), inner_value) for inner, inner_value in value.items())
        else:
            yield (key,), value


def _translate_datasets(value: Any) -> Any:
    """Convert Axolotl's `datasets: [{path, type}]`, where `completion` means plain text."""
    if not isinstance(value, list):
        return value
    renamed = {"type": "format", "ds_type": "format"}
    sources = [
        {renamed.get(key, key): item for key, item in source.items()} if isinstance(source, dict) else source
        for source in value
    ]
    for source in sources:
        if isinstance(source, dict) and source.get("format") == "completion":
            source["format"] = "auto"
    return sources


def _of_metadata(name: str) -> Change:
    """Metadata of the job and of its pods."""
    return lambda value: {f"{_KUBERNETES}.{patch}.metadata.{name}": value for patch in ("patch", "pod_patch")}


def _of_request(member: str, make: Callable[[Any], Any] = lambda value: value) -> Change:
    """The member of a CreateTrainingJob request that replaces a key; none for a value that is empty."""
    return lambda value: {f"{_SAGEMAKER}.patch": {member: make(value)}} if value else {}


def _describe_elsewhere(machines: Any) -> Mapping[str, Any]:
    """Refuse machines that a recipe describes, with what to write into a file instead. Raises ConfigError."""
    rows = [dict(row) for row in (machines if isinstance(machines, list) else ()) if isinstance(row, Mapping)]
    if not rows:
        return {}
    named = {row.pop("name", "NAME"): row for row in rows}
    prices = {name: row.pop("usd_per_hour") for name, row in named.items() if "usd_per_hour" in row}
    text: dict[str, Any] = {"region": "REGION", "date": "YYYY-MM-DD", "source": "mine", "usd_per_hour": prices}
    text["machines"] = {name: row for name, row in named.items() if row}
    raise ConfigError(
        f"launch.sagemaker.extra_types is of an earlier version; remove it, and write into {find_cache_dir()}/prices/"
        f"mine.yaml (docs/cost.md): {render_inline([text])}"
    )


def _join_warmup(old: Mapping[str, Any], optim: Mapping[str, Any]) -> Any:
    """The warm-up with its unit, which is that of the schedule too. Two lengths make a text that is refused."""
    warmup = optim.get("warmup")
    values = {name: old[name] for name in ("warmup_steps", "warmup_tokens", "warmup_fraction") if old.get(name)}
    if len(values) + bool(warmup) > 1:
        both = {"warmup": warmup} if warmup else {}
        return " and ".join(f"{name}={value}" for name, value in (values | both).items())
    for name, value in values.items():
        warmup = f"{value} tokens" if name == "warmup_tokens" else value
    if old.get("schedule_unit", "steps") == "steps" or str(warmup).endswith("tokens"):
        return warmup or 0
    if isinstance(warmup, float) and 0 < warmup < 1:
        warmup = f"{show_number(100 * Fraction(str(warmup)))}%"
    return f"{warmup} of tokens" if warmup else "0 tokens"


_DATA_AXES = ["dp_replicate", "dp_shard", "cp"]
_ORDERS = {"cluster": [*_DATA_AXES, "pp", "tp"], "spread": ["tp", "pp", *_DATA_AXES]}
_AHEAD = "activation_loading_horizon"
_CLIPS = ("clip_low", "clip_high")
_SKIPS = {"uniform": "skip_uniform_groups", "truncated": "skip_truncated"}
_ROWWISE = {("fp8", "rowwise"): "fp8_rowwise"}
_SBATCH = {"partition": "partition", "cpus_per_task": "cpus-per-task", "memory": "mem"}
_POD_FIELDS = {"node_selector": "nodeSelector", "security_context": "securityContext"}
_CONTAINER_FIELDS = {"container_security_context": "securityContext", "image_pull_policy": "imagePullPolicy"}
_CONTAINERS = {"pytorchjob": "pytorch", "hyperpod": "pytorch-job-container"}


def _join_pod(old: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """The patch of the pods with the fields that were keys; what the patch has wins, as it did."""
    pod = {field: old[name] for name, field in _POD_FIELDS.items() if old.get(name)}
    container = {field: old[name] for name, field in _CONTAINER_FIELDS.items() if old.get(name)}
    patch = _merge({"spec": pod} if pod or container else {}, settings.get("pod_patch") or {})
    if container:
        name = _CONTAINERS.get(settings.get("kind", "pytorchjob"), "node")
        entries = {entry["name"]: entry for entry in patch["spec"].get("containers", ())}
        entries[name] = _merge({"name": name, **container}, entries.get(name, {}))
        patch["spec"]["containers"] = list(entries.values())
    return patch


def _join_job(old: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """The patch of the job with the time after which it is deleted."""
    spec = {"ttlSecondsAfterFinished": old["ttl_seconds"]}
    is_policy = settings.get("kind", "pytorchjob") in _CONTAINERS
    return _merge({"spec": {"runPolicy": spec} if is_policy else spec}, settings.get("patch") or {})


def _join_address(old: Mapping[str, Any], prometheus: Mapping[str, Any]) -> Any:
    host, _, port = prometheus.get("address", "127.0.0.1:auto").rpartition(":")
    return f"{old.get('host', host)}:{old.get('port', port)}"


def _merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings; where both have a value, that of `patch`."""
    both = {key: _merge(base[key], patch[key]) for key in base if isinstance(base[key], dict) and key in patch}
    return {**base, **patch, **both}


Join = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""Of the values of earlier keys, by name, and of the section without them: the value that replaces them all."""

JOINED: dict[str, tuple[tuple[str, ...], Join]] = {
    "optim.warmup": (("warmup_steps", "warmup_tokens", "warmup_fraction", "schedule_unit"), _join_warmup),
    f"{_KUBERNETES}.pod_patch": (tuple({**_POD_FIELDS, **_CONTAINER_FIELDS}), _join_pod),
    f"{_KUBERNETES}.patch": (("ttl_seconds",), _join_job),
    "train.precision": (
        ("float8_scaling",),
        lambda old, train: _ROWWISE.get((train.get("precision"), *old.values()), train.get("precision", "auto")),
    ),
    "train.activation_offloading": (  # 0 layers ahead took the memory of 1
        (_AHEAD,),
        lambda old, train: old[_AHEAD] or True if (on := train.get("activation_offloading", False)) is True else on,
    ),
    "rollout.skip": (
        tuple(_SKIPS.values()),
        lambda old, rollout: [name for name, key in _SKIPS.items() if old.get(key, name in rollout.get("skip", ()))],
    ),
    "objective.clip": (
        _CLIPS,
        lambda old, new: [old.get(key, clip) for key, clip in zip(_CLIPS, new.get("clip", (0.2, 0.2)), strict=True)],
    ),
    "launch.slurm.options": (
        tuple(_SBATCH),
        lambda old, slurm: {_SBATCH[name]: value for name, value in old.items()} | slurm.get("options", {}),
    ),
    "launch.torchrun.ssh_options": (("user",), lambda old, ssh: [*ssh.get("ssh_options", ()), "-l", old["user"]]),
    "mlflow.log_model": (("register_model",), lambda old, _: old["register_model"]),
    "prometheus.address": (("host", "port"), _join_address),
}
"""The keys that several of earlier versions became, in the same section."""

REPLACED = {
    f"{key.partition('.')[0]}.{name}": key
    for key in ("optim.warmup", "objective.clip", "prometheus.address", "rollout.skip")
    for name in JOINED[key][0]
} | {f"launch.slurm.{name}": f"launch.slurm.options.{option}" for name, option in _SBATCH.items()}
"""The earlier keys of those that are new themselves: an override of such a key takes their place."""

EXTENDED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "train.float8_scaling": ("train.precision", lambda value: value == "fp8_rowwise"),
    f"train.{_AHEAD}": ("train.activation_offloading", lambda value: type(value) is int),
    "mlflow.register_model": ("mlflow.log_model", lambda value: isinstance(value, str)),
}
"""The earlier keys that others took in, which are as old, and whether a value of theirs is a new one."""

FORMER: dict[str, Successor] = {
    **_FORMER["replaced"],
    "checkpoint.saves_per_epoch": lambda times: {"checkpoint.every": f"1/{times} epochs"},
    "train.evals_per_epoch": lambda times: {"train.eval_every": f"1/{times} epochs"},
    "sync.name": lambda name: {"fault.on_lost_process": "continue"} if name == "quorum" else None,
    "parallel.placement": lambda name: {"parallel.order": _ORDERS.get(name, name)},
    "wandb.project": lambda name: {} if name == "echelon" else {"launch.env.WANDB_PROJECT": name},
    "horovod.fusion_threshold_mb": lambda mb: {"launch.env.HOROVOD_FUSION_THRESHOLD": f"{mb * 2.0**20:.0f}"},
    "horovod.cycle_time_ms": lambda ms: {"launch.env.HOROVOD_CYCLE_TIME": f"{ms + 0:g}"},
    "mlflow.system_metrics": lambda asked: (
        {} if asked else {"launch.env.MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}
    ),
    "budget.quote": lambda value: {f"launch.env.{QUOTE_VARIABLE}": json.dumps(value)},
    "launch.sagemaker.extra_types": _describe_elsewhere,
    f"{_KUBERNETES}.efa_per_node": lambda number: {f"{_KUBERNETES}.resources": {"vpc.amazonaws.com/efa": number}},
    f"{_KUBERNETES}.image_pull_secrets": lambda names: {
        f"{_POD}.imagePullSecrets": [{"name": name} for name in names] if isinstance(names, list) else names
    },
    # With the machine's network, the default policy would not resolve the names of pods.
    f"{_KUBERNETES}.host_network": lambda value: {
        f"{_POD}.hostNetwork": value or None,
        f"{_POD}.dnsPolicy": "ClusterFirstWithHostNet" if value else None,
    },
    **{f"{_KUBERNETES}.{name}": _of_metadata(name) for name in ("labels", "annotations")},
    f"{_SAGEMAKER}.encrypt_traffic": _of_request("EnableInterContainerTrafficEncryption"),
    f"{_SAGEMAKER}.max_attempts": lambda number: (
        {f"{_SAGEMAKER}.patch": {"RetryStrategy": {"MaximumRetryAttempts": number - 1}}} if number > 1 else {}
    ),
    f"{_SAGEMAKER}.profiler": _of_request("ProfilerConfig"),
    f"{_SAGEMAKER}.remote_debug": _of_request("RemoteDebugConfig", lambda value: {"EnableRemoteDebug": value}),
    "tensorflow.strategy": lambda value: {"tensorflow.strategy": "multi_worker"} if value == "single" else None,
}
"""The keys of earlier versions, dotted."""


def read_former(
    path: KeyPath, value: Any, origin: str, former: Mapping[str, Successor] = FORMER
) -> tuple[Mapping[KeyPath, Any], str] | None:
    """Return the paths and values that replace a key of an earlier version, and the line for it; None: it is not one.

    Of a mapping, each value has its own path, so that it joins what the recipe has beside it.
    """
    length = next((n for n in range(len(path), 0, -1) if dotted(path[:n]) in former), None)
    if length is None or value is None:
        return None
    for part in reversed(path[length:]):  # an override of a part of an earlier mapping
        value = {part: value}
    name = dotted(path[:length])
    _check(name, value, origin)
    successor = former[name]
    why = f", because {successor}" if isinstance(successor, str) and " " in successor else ""
    new = {} if why else {successor: value} if isinstance(successor, str) else _apply(successor, (value,), origin, name)
    if new is None:
        return None
    meaning = ", ".join(f"{key}: {show_value(part)}" for key, part in new.items()) or f"nothing{why}; remove it"
    note = f"{origin}: {name}: {show_value(value)} is of an earlier version and is read as {meaning}."
    return {leaf: part for key, whole in new.items() for leaf, part in _leaves(tuple(key.split(".")), whole)}, note


def replace_former(draft: Draft, former: Mapping[str, Successor] = FORMER) -> list[str]:
    """Replace keys of earlier versions in `draft`; return a line for each.

    Raises ConfigError if a key and its successor are both given.
    """
    notes = []
    for path in [tuple(name.split(".")) for name in former]:
        origin = draft.origin(path)
        if (replaced := read_former(path, draft.get(path), origin, former)) is None:
            if draft.get(path) is None:
                draft.remove(path)
            continue
        draft.remove(path)
        if draft.get(path[:-1]) == {}:
            draft.remove(path[:-1])
        for new, value in replaced[0].items():
            if new != path[: len(new)]:
                _refuse_both(draft, path, new, origin)
            draft.set(new, value, origin)
        notes.append(replaced[1])
    return notes


def refuse_both(draft: Draft) -> None:
    """Raise ConfigError if a file gives a key, and one of earlier versions that it replaces."""
    for key, successor in {**REPLACED, **{old: new for old, (new, _) in EXTENDED.items()}}.items():
        old, new = tuple(key.split(".")), tuple(successor.split("."))
        is_new = key in REPLACED or EXTENDED[key][1](draft.get(new))
        if draft.get(old) is not None and is_new:
            _refuse_both(draft, old, new, draft.origin(old))


def _refuse_both(draft: Draft, old: KeyPath, new: KeyPath, origin: str) -> None:
    if draft.holds(new):
        raise ConfigError(
            f"{origin}: {dotted(old)} is now {dotted(new)}, which is also given ({draft.origin(new)}); keep "
            f"{dotted(new)}."
        )


def _check(name: str, value: Any, origin: str) -> None:
    """Raise ConfigError for a value that a key of an earlier version did not take."""
    kind = _FORMER["values"].get(name)
    taken = kind if isinstance(kind, list) else [value] if kind is None or type(value) is _KINDS[kind] else []
    if value not in taken or (type(value) is int and value < 0):
        words = " or ".join(taken) if isinstance(kind, list) else kind
        raise ConfigError(f"{origin}: {name}={show_value(value)}, of an earlier version, must be {words}; correct it.")


def _apply(change: Callable[..., Any], values: tuple[Any, ...], origin: str, name: str) -> Any:
    try:
        return change(*values)
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(
            f"{origin}: {name}, of an earlier version, has a value of another kind; correct it."
        ) from None


def join_former(draft: Draft, joined: Mapping[str, tuple[tuple[str, ...], Join]] = JOINED) -> list[str]:
    """Replace keys of earlier versions that became one, after all overrides; return a line for each new key."""
    notes = []
    for key, (names, join) in joined.items():
        *around, _ = new = tuple(key.split("."))
        old = {name: value for name in names if (value := draft.get((*around, name))) is not None}
        origin = draft.origin((*around, *list(old)[:1]))
        for name in names:
            draft.remove((*around, name))
        for name, part in old.items():
            _check(dotted((*around, name)), part, origin)
        if old:
            value = _apply(join, (old, draft.get(tuple(around)) or {}), origin, ", ".join(old))
            draft.set(new, value, origin)
            shown = ", ".join(f"{dotted((*around, name))}: {show_value(part)}" for name, part in old.items())
            verb = "is" if len(old) == 1 else "are"
            notes.append(
                f"{origin}: {shown} {verb} of an earlier version and {verb} read as {key}: {show_value(value)}."
            )
    return notes


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves((*path, key), part)
    else:
        yield path, value
