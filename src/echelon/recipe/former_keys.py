"""Reads keys of earlier versions of echelon: each becomes the keys that replace it, with a line that names them."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.variables import QUOTE_VARIABLE, find_cache_dir
from echelon.recipe.draft import Draft
from echelon.recipe.keys import KeyPath, dotted
from echelon.recipe.yaml_text import render_inline, show_value

Successor = str | Callable[[Any], Mapping[str, Any] | None]
"""The new dotted key, which takes the value as it is; or a function of the value to the new keys with their values. No
keys: the old one is needless; None: this value is not of an earlier version. A text with spaces: why the key is
needless."""

_SAGEMAKER, _KUBERNETES, _POD = "launch.sagemaker", "launch.kubernetes", "launch.kubernetes.pod_patch.spec"


def _of_metadata(name: str) -> Successor:
    """Metadata of the job and of its pods."""
    return lambda value: {f"{_KUBERNETES}.{patch}.metadata.{name}": value for patch in ("patch", "pod_patch")}


def _of_request(member: str, make: Callable[[Any], Any] = lambda value: value) -> Successor:
    """The member of a CreateTrainingJob request that replaces a key; none for a value that is empty."""
    return lambda value: {f"{_SAGEMAKER}.patch": {member: make(value)}} if value else {}


def _describe_elsewhere(machines: Any) -> Mapping[str, Any]:
    """Refuse machines that a recipe describes, with what to write into a file instead. Raises ConfigError."""
    given = machines if isinstance(machines, list) else []
    rows = [dict(machine) for machine in given if isinstance(machine, Mapping)]
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


FORMER: dict[str, Successor] = {
    "budget.quote": lambda value: {f"launch.env.{QUOTE_VARIABLE}": json.dumps(value)},
    "launch.sagemaker.extra_types": _describe_elsewhere,
    "model.rope.type": "model.rope.rope_type",
    **{
        f"launch.slurm.{name}": f"launch.slurm.options.{name}"
        for name in ("account", "qos", "constraint", "reservation", "exclusive")
    },
    f"{_KUBERNETES}.cpu": f"{_KUBERNETES}.resources.cpu",
    f"{_KUBERNETES}.memory": f"{_KUBERNETES}.resources.memory",
    f"{_KUBERNETES}.efa_per_node": lambda number: {f"{_KUBERNETES}.resources": {"vpc.amazonaws.com/efa": number}},
    f"{_KUBERNETES}.service_account": f"{_POD}.serviceAccountName",
    f"{_KUBERNETES}.image_pull_secrets": lambda names: {
        f"{_POD}.imagePullSecrets": [{"name": name} for name in names] if isinstance(names, list) else names
    },
    f"{_KUBERNETES}.tolerations": f"{_POD}.tolerations",
    f"{_KUBERNETES}.affinity": f"{_POD}.affinity",
    f"{_KUBERNETES}.priority_class": f"{_POD}.priorityClassName",
    f"{_KUBERNETES}.scheduler": f"{_POD}.schedulerName",
    # With the machine's network, the default policy would not resolve the names of pods.
    f"{_KUBERNETES}.host_network": lambda value: {
        f"{_POD}.hostNetwork": value or None,
        f"{_POD}.dnsPolicy": "ClusterFirstWithHostNet" if value else None,
    },
    f"{_KUBERNETES}.labels": _of_metadata("labels"),
    f"{_KUBERNETES}.annotations": _of_metadata("annotations"),
    f"{_KUBERNETES}.runtime": f"{_KUBERNETES}.patch.spec.runtimeRef.name",
    f"{_SAGEMAKER}.sdk": "every job is the same CreateTrainingJob request, sent by boto3",
    f"{_SAGEMAKER}.endpoint": "echelon serves no models; docs/sagemaker.md#serving-a-model says how AWS does",
    f"{_SAGEMAKER}.profiler": _of_request("ProfilerConfig"),
    f"{_SAGEMAKER}.remote_debug": _of_request("RemoteDebugConfig", lambda value: {"EnableRemoteDebug": value}),
    "tensorflow.servers": "sync.servers",
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
    successor = former[name]
    why = f", because {successor}" if isinstance(successor, str) and " " in successor else ""
    new = {} if why else {successor: value} if isinstance(successor, str) else successor(value)
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
        if (found := read_former(path, draft.get(path), origin, former)) is None:
            continue
        draft.remove(path)
        if draft.get(path[:-1]) == {}:
            draft.remove(path[:-1])
        for new, value in found[0].items():
            if draft.holds(new) and new != path[: len(new)]:
                raise ConfigError(
                    f"{origin}: {dotted(path)} is now {dotted(new)}, which is also given ({draft.origin(new)}); keep "
                    f"{dotted(new)}."
                )
            draft.set(new, value, origin)
        notes.append(found[1])
    return notes


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves((*path, key), part)
    else:
        yield path, value
