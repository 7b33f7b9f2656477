"""Merge the recipe's patches into what a launcher submits, by the rules of `kubectl patch --type=strategic`."""

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.ground.errors import ConfigError

# The key that identifies an entry of a list: `patchMergeKey` of core/v1, and the keys of the operators' own lists; then
# those of SageMaker's CreateTrainingJob. Any other list is replaced.
_ENTRY_KEYS = {
    "containers": "name", "initContainers": "name", "env": "name", "volumes": "name", "imagePullSecrets": "name",
    "resourceClaims": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort",
    "hostAliases": "ip", "topologySpreadConstraints": "topologyKey", "replicatedJobs": "name", "replicaSpecs": "name",
    "runtimePatches": "manager",
    "InputDataConfig": "ChannelName", "MetricDefinitions": "Name", "Tags": "Key",
}  # fmt: skip
_DIRECTIVE = "$patch"


def merge_patch(value: Any, patch: Any, key: str) -> Any:
    """The value with the patch applied: mappings are merged, null removes a field, entries of named lists are merged.

    An entry `{name: NAME, $patch: delete}` removes that entry. `key` is the patch's place in the recipe, for errors.
    Raises ConfigError for an entry without its name.
    """
    if isinstance(patch, Mapping):
        merged = dict(value) if isinstance(value, Mapping) else {}
        for name, part in patch.items():
            if part is None:
                merged.pop(name, None)
            else:
                merged[name] = merge_patch(merged.get(name), part, f"{key}.{name}")
        return merged
    entry_key = _ENTRY_KEYS.get(key.rpartition(".")[2])
    if entry_key is None or not isinstance(patch, list | tuple):
        return patch
    return _merge_entries(value if isinstance(value, list) else [], patch, entry_key, key)


def _merge_entries(entries: Sequence[Any], patch: Sequence[Any], entry_key: str, key: str) -> list[Any]:
    merged = {entry.get(entry_key): entry for entry in entries}
    for part in patch:
        if not isinstance(part, Mapping) or part.get(entry_key) is None:
            raise ConfigError(f"{key}: the entry {part} has no {entry_key}, which tells it from others; add it.")
        name = part[entry_key]
        if part.get(_DIRECTIVE) == "delete":
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), part, key)
    return list(merged.values())
