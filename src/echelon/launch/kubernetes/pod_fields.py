"""Field names of the parts of a pod that a recipe passes on unchanged: misspelled ones are refused before submission.

Names: the API of core/v1, compared with the official client's models in the tests.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.recipe.launch_sections import KubernetesConfig, VolumeConfig
from echelon.recipe.yaml_text import read_table

_KEY = "launch.kubernetes"
FIELDS: Mapping[str, tuple[str, ...]] = {
    setting: tuple(names.split()) for setting, names in read_table(Path(__file__).with_name("pod_fields.yaml")).items()
}
"""The fields of each setting."""

# Deleted with the pod, or never writable.
_EPHEMERAL = ("emptyDir", "ephemeral", "configMap", "downwardAPI", "gitRepo", "image", "projected", "secret")


def check_pod_fields(settings: KubernetesConfig) -> None:
    """Raise ConfigError for the first field that a pod does not have, and for a patch that would hide the job."""
    for toleration in settings.tolerations:
        _check_fields("tolerations", toleration)
    for key in ("affinity", "security_context", "container_security_context"):
        _check_fields(key, getattr(settings, key))
    for volume in settings.volumes:
        _check_fields("volumes.source", volume.source or {})
    for key in ("patch", "pod_patch"):
        patch = getattr(settings, key)
        other = [name for name in patch if name not in ("metadata", "spec")]
        if other:
            raise ConfigError(
                f"{_KEY}.{key}.{other[0]}: a patch has metadata and spec; put {other[0]} below one of them."
            )
    metadata = settings.patch.get("metadata") or {}
    for name in ("name", "namespace"):
        if name in metadata:
            raise ConfigError(
                f"{_KEY}.patch.metadata.{name}={metadata[name]}: echelon could not find the job again; set "
                f"{'run.name' if name == 'name' else f'{_KEY}.namespace'} instead."
            )


def is_ephemeral(volume: VolumeConfig) -> bool:
    """Whether a run's files would be lost on the volume, or could not be written to it."""
    return any(name in _EPHEMERAL for name in volume.source or ())


def _check_fields(key: str, given: Iterable[Any]) -> None:
    for name in given:
        if name not in FIELDS[key]:
            near = difflib.get_close_matches(str(name), FIELDS[key], n=1)
            raise ConfigError(
                f"{_KEY}.{key}: {name} is not a field of {'a toleration' if key == 'tolerations' else key}; "
                + (f"did you mean {near[0]}?" if near else f"the fields are {', '.join(FIELDS[key])}.")
            )
