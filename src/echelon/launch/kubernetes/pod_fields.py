"""Field names of the parts of a pod that a recipe passes on unchanged: misspelled ones are refused before submission.

Names: the API of core/v1, compared with the official client's models in the tests.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from echelon.errors import ConfigError
from echelon.recipe.launching import KubernetesConfig, VolumeConfig

_KEY = "launch.kubernetes"
_BOTH_CONTEXTS = (
    "appArmorProfile", "runAsGroup", "runAsNonRoot", "runAsUser", "seLinuxOptions", "seccompProfile", "windowsOptions",
)  # fmt: skip
FIELDS: Mapping[str, tuple[str, ...]] = {
    "tolerations": ("key", "operator", "value", "effect", "tolerationSeconds"),
    "affinity": ("nodeAffinity", "podAffinity", "podAntiAffinity"),
    "security_context": (
        *_BOTH_CONTEXTS, "fsGroup", "fsGroupChangePolicy", "seLinuxChangePolicy", "supplementalGroups",
        "supplementalGroupsPolicy", "sysctls",
    ),
    "container_security_context": (
        *_BOTH_CONTEXTS, "allowPrivilegeEscalation", "capabilities", "privileged", "procMount",
        "readOnlyRootFilesystem",
    ),
    "volumes.source": (
        "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "configMap", "csi", "downwardAPI",
        "emptyDir", "ephemeral", "fc", "flexVolume", "flocker", "gcePersistentDisk", "gitRepo", "glusterfs", "hostPath",
        "image", "iscsi", "nfs", "persistentVolumeClaim", "photonPersistentDisk", "portworxVolume", "projected",
        "quobyte", "rbd", "scaleIO", "secret", "storageos", "vsphereVolume",
    ),
}  # fmt: skip
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
