"""Offline checks of a Kubernetes job: names, quantities, paths, and features that a job kind does not have.

The parts of a pod that a recipe passes on unchanged have only known fields: those of core/v1, compared with the
official client's models in the tests.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

from echelon.ground.errors import ConfigError, MissingSettingError
from echelon.launch.job import JobSpec, count_gpus, list_inputs
from echelon.launch.kubernetes.kinds import PORT, JobKind, find_kind, is_elastic, longest_pod_name
from echelon.launch.kubernetes.pod import (
    RECIPE_MOUNT,
    SHARED_MEMORY_MOUNT,
    build_resources,
    count_processes,
    find_workdir,
    grace_seconds,
)
from echelon.launch.records import STAMP_LENGTH
from echelon.planner.hardware.gpu_check import check_image_devices
from echelon.planner.replica_limits import refuse_living_on
from echelon.recipe.launch_sections import KubernetesConfig, VolumeConfig
from echelon.recipe.yaml_text import read_table

_KEY = "launch.kubernetes"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_LENGTH = 63
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_LENGTH = 253
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|Ki|[MGTPE]i?)?")
_SIZES = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,499}")
# Labels of a job's objects that echelon sets.
_OWN_LABELS = {
    "app.kubernetes.io/name": "",
    "app.kubernetes.io/instance": "",
    "kueue.x-k8s.io/queue-name": f" from {_KEY}.queue",
}
# Resources with a key of their own.
_OWN_RESOURCES = {
    "cpu": "cpu",
    "memory": "memory",
    "nvidia.com/gpu": "gpus_per_node",
    "vpc.amazonaws.com/efa": "efa_per_node",
}
# Kinds without a time limit.
_ENDLESS = ("volcano", "trainjob-2.0", "trainjob-2.1")
# Paths of the container that a volume must not hide.
_TAKEN = (RECIPE_MOUNT, SHARED_MEMORY_MOUNT, "/", "/proc", "/sys", "/dev")


def check_job(job: JobSpec) -> list[str]:
    """Check the job and return lines for the user. Raises ConfigError for the first fault."""
    settings = job.recipe.launch.kubernetes
    if settings.image is None:
        raise MissingSettingError(
            f"{_KEY}.image is not set; give a container image in which echelon is installed.",
            {f"{_KEY}.image": f"SET-{_KEY}.image"},
        )
    if not _IMAGE.fullmatch(settings.image):
        raise ConfigError(f"{_KEY}.image={settings.image!r} is not an image name; write it like registry/name:tag.")
    _check_kind(job)
    _check_names(job)
    _check_devices(job)
    _check_amounts(settings)
    _check_mounts(settings)
    _check_places(job)
    check_pod_fields(settings)
    return _describe(job)


def read_quantity(text: str) -> Decimal | None:
    """Parse a Kubernetes quantity, in bytes or cores: `200Gi`, `0.5`, `500m`. None if it is not valid."""
    match = _QUANTITY.fullmatch(text)
    return Decimal(match[1]) * _SIZES[match[2] or ""] if match else None


def _check_kind(job: JobSpec) -> None:
    """Refuse settings for which the job kind has no field."""
    settings = job.recipe.launch.kubernetes
    kind = find_kind(job)
    what = {"volcano": "a Job of Volcano", "mpijob": "an MPIJob"}.get(settings.kind, f"a {kind.kind}")
    if version := settings.kind.partition("-")[2]:
        what += f" of Kubeflow Trainer {version}"
    if is_elastic(job) and not kind.is_elastic:
        raise ConfigError(
            f"launch.nodes={job.recipe.launch.nodes}: {what} has a fixed number of pods; use "
            f"launch.nodes={job.nodes[1]}, or {_KEY}.kind=pytorchjob."
        )
    if settings.kind != "pytorchjob" or job.nodes[1] == 1:  # the other operators restart all pods of a job together
        refuse_living_on(job.recipe)
    if settings.kind in _ENDLESS and job.recipe.launch.max_hours is not None:
        raise ConfigError(
            f"launch.max_hours={job.recipe.launch.max_hours:g}: {what} has no time limit; set budget.max_hours instead."
        )
    if kind.kind in ("TrainJob", "MPIJob") and settings.env_from_secrets:
        raise ConfigError(
            f"{_KEY}.env_from_secrets: the processes of {what} cannot take variables from whole Secrets; mount "
            f"the Secret as a volume ({_KEY}.volumes with secret_name) and read it in launch.setup, or use "
            f"{_KEY}.kind=pytorchjob."
        )
    _check_fields_of_kind(settings, kind, what)
    if settings.kind == "rayjob" and settings.host_network:
        raise ConfigError(f"{_KEY}.host_network: the ports of a Ray cluster need pods with addresses; remove it.")


def _check_fields_of_kind(settings: KubernetesConfig, kind: JobKind, what: str) -> None:
    default = KubernetesConfig()
    for name in kind.lacks:
        value = getattr(settings, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"{_KEY}.{name}={value}: {what} has no field for it; set it in the runtime {settings.runtime}, or "
                f"use {_KEY}.kind=jobset."
            )
    if settings.kind == "trainjob-2.0" and "metadata" in settings.pod_patch:
        raise ConfigError(f"{_KEY}.pod_patch.metadata: {what} has no field for it; set it in the runtime.")
    if kind.kind != "TrainJob" and settings.runtime != default.runtime:
        raise ConfigError(
            f"{_KEY}.runtime={settings.runtime}: only a TrainJob has a runtime; use {_KEY}.kind=trainjob, or remove it."
        )


def _check_names(job: JobSpec) -> None:
    settings = job.recipe.launch.kubernetes
    pod = longest_pod_name(job)
    if len(pod) > _LABEL_LENGTH:
        most = _LABEL_LENGTH - (len(pod) - len(job.name)) - STAMP_LENGTH
        raise ConfigError(
            f"run.name={job.recipe.run.name}: the pod name {pod} would have {len(pod)} characters, but Kubernetes "
            f"allows {_LABEL_LENGTH}; use a name of at most {most} characters."
        )
    _check_name(f"{_KEY}.namespace", settings.namespace, _LABEL, _LABEL_LENGTH)
    subdomains: dict[str, Iterable[str | None]] = {
        "service_account": [settings.service_account],
        "runtime": [settings.runtime],
        "queue": [settings.queue],
        "priority_class": [settings.priority_class],
        "scheduler": [settings.scheduler],
        "image_pull_secrets": settings.image_pull_secrets,
        "env_from_secrets": settings.env_from_secrets,
        "volumes": [claim for volume in settings.volumes for claim in (volume.claim, volume.secret_name)],
    }
    for key, names in subdomains.items():
        for name in names:
            if name is not None:
                _check_name(f"{_KEY}.{key}", name, _SUBDOMAIN, _SUBDOMAIN_LENGTH)
    if settings.queue is not None and len(settings.queue) > _LABEL_LENGTH:
        raise ConfigError(f"{_KEY}.queue={settings.queue} becomes a label; use at most {_LABEL_LENGTH} characters.")
    _check_labels("node_selector", settings.node_selector, "; see `kubectl get nodes --show-labels`")
    _check_labels("labels", settings.labels)
    for label in settings.labels:
        if label in _OWN_LABELS:
            raise ConfigError(f"{_KEY}.labels.{label} is set by echelon{_OWN_LABELS[label]}; remove it.")
    for name in (*settings.annotations, *settings.resources):
        if not _is_qualified(name):
            key = "annotations" if name in settings.annotations else "resources"
            raise ConfigError(
                f"{_KEY}.{key}: {name!r} is not a valid name; write it like example.com/name, with letters, digits, -, "
                f"_ and ., at most {_LABEL_LENGTH} characters after the slash."
            )


def _check_labels(key: str, labels: Mapping[str, str], hint: str = "") -> None:
    for label, value in labels.items():
        if not _is_qualified(label) or not _VALUE.fullmatch(value) or len(value) > _LABEL_LENGTH:
            raise ConfigError(
                f"{_KEY}.{key}.{label}={value!r} is not a valid label; use letters, digits, -, _ and ., at most "
                f"{_LABEL_LENGTH} characters{hint}."
            )


def _is_qualified(label: str) -> bool:
    """Whether this is a valid name of a label, an annotation or a resource: `NAME` or `DOMAIN/NAME`."""
    prefix, slash, name = label.rpartition("/")
    is_name = bool(name) and len(name) <= _LABEL_LENGTH and _VALUE.fullmatch(name) is not None
    return is_name and (not slash or _SUBDOMAIN.fullmatch(prefix) is not None)


def _check_name(key: str, name: str, rule: re.Pattern[str], length: int) -> None:
    if len(name) > length or not rule.fullmatch(name):
        dots = ", dots" if rule is _SUBDOMAIN else ""
        raise ConfigError(
            f"{key}={name!r} is not a valid Kubernetes name; use lower-case letters, digits{dots} and inner dashes, "
            f"at most {length} characters."
        )


def _check_devices(job: JobSpec) -> None:
    launch = job.recipe.launch
    if launch.nproc_per_node == "auto" and launch.kubernetes.gpus_per_node is None:
        raise MissingSettingError(
            f"{_KEY}.gpus_per_node is not set and launch.nproc_per_node is auto: a pod only gets the GPUs that it "
            f"requests; set {_KEY}.gpus_per_node, or set it to 0 to use CPUs only.",
            {f"{_KEY}.gpus_per_node": 1},
        )
    gpus, processes = count_gpus(job), count_processes(job)
    if launch.kubernetes.kind in ("hyperpod", "mpijob") and not processes:
        raise ConfigError(
            f"launch.nproc_per_node=auto: {_KEY}.kind={launch.kubernetes.kind} without GPUs needs the number of "
            "processes per pod; set launch.nproc_per_node."
        )
    if gpus and processes != gpus:
        raise ConfigError(
            f"{_KEY}.gpus_per_node={gpus}: each of the launch.nproc_per_node={processes} processes uses one GPU; set "
            "both to the same number."
        )
    if gpus:
        allowed = job.recipe.train.allow_cpu
        check_image_devices(f"{_KEY}.image", launch.kubernetes.image or "", "each pod", gpus, allowed)
    for name, amount in launch.kubernetes.resources.items():
        if name in _OWN_RESOURCES:
            raise ConfigError(f"{_KEY}.resources.{name}={amount}: set {_KEY}.{_OWN_RESOURCES[name]} instead.")
        if not read_quantity(str(amount)):
            raise ConfigError(
                f"{_KEY}.resources.{name}={amount!r} is not a positive quantity; write it like 1 or 10Gi."
            )
        if gpus and (name.startswith("nvidia.com/mig-") or name.endswith("/gpu")):
            raise ConfigError(
                f"{_KEY}.resources.{name}={amount}: launch.nproc_per_node or {_KEY}.gpus_per_node already requests "
                f"{gpus} nvidia.com/gpu per pod; set {_KEY}.gpus_per_node to 0."
            )


def _check_amounts(settings: KubernetesConfig) -> None:
    for key in ("cpu", "memory", "shared_memory"):
        text = getattr(settings, key)
        if text is not None and not read_quantity(text):
            raise ConfigError(
                f"{_KEY}.{key}={text!r} is not a quantity; write it like 8 or 500m for cores, 200Gi for bytes."
            )
    memory = None if settings.memory is None else read_quantity(settings.memory)
    shared = read_quantity(settings.shared_memory)
    if memory is not None and shared is not None and shared >= memory:
        raise ConfigError(
            f"{_KEY}.shared_memory={settings.shared_memory} is part of memory={settings.memory}, so no memory is left; "
            "request more memory, or less shared memory."
        )


def _check_mounts(settings: KubernetesConfig) -> None:
    mounts = [_normal(volume.mount) for volume in settings.volumes]
    for mount in mounts:
        if ".." in PurePosixPath(mount).parts or ":" in mount:
            raise ConfigError(f"{_KEY}.volumes: {mount} is not a valid mount path; remove `..` and `:`.")
        if mount in _TAKEN or mounts.count(mount) > 1:
            raise ConfigError(f"{_KEY}.volumes: {mount} is already in use; mount the volume elsewhere.")


def _check_places(job: JobSpec) -> None:
    """Check that the run's paths are on volumes: a pod's own disk is deleted with the pod."""
    recipe = job.recipe
    settings = recipe.launch.kubernetes
    run_dir = str(recipe.run.dir)
    if not settings.volumes:
        raise MissingSettingError(
            f"{_KEY}.volumes is empty, so run.dir={run_dir} would be deleted with the pod; mount a volume that all "
            "pods share, such as [{mount: /data, claim: NAME}].",
            {f"{_KEY}.volumes": [{"mount": f"/SET-{_KEY}.volumes", "claim": f"set-{_KEY}.volumes"}]},
        )
    workdir = find_workdir(job)
    if not workdir.is_absolute():
        raise ConfigError(f"{_KEY}.workdir={workdir} is not absolute; give the path of a folder in the container.")
    if _find_volume(job, run_dir, writable=True) is None:
        raise ConfigError(
            f"run.dir={run_dir} is {workdir / run_dir} in the pods, which is not on a writable volume; use a "
            f"path below {_list_mounts(job, writable=True)}, or set {_KEY}.workdir."
        )
    for key, path in list_inputs(recipe):
        if _find_volume(job, path) is None:
            raise ConfigError(
                f"{key}={path} is {workdir / path} in the pods, which is not on a volume; use a path below "
                f"{_list_mounts(job)}."
            )


def _find_volume(job: JobSpec, path: str, writable: bool = False) -> str | None:
    """The mount path of the volume that contains a path of the recipe; None if there is none."""
    place = PurePosixPath(_normal(str(find_workdir(job) / path)))
    for volume in job.recipe.launch.kubernetes.volumes:
        if place.is_relative_to(_normal(volume.mount)) and not (writable and _is_read_only(volume)):
            return volume.mount
    return None


def _is_read_only(volume: VolumeConfig) -> bool:
    """Whether a run cannot be kept on the volume: it is read-only, or deleted with the pod."""
    return volume.read_only or volume.secret_name is not None or is_ephemeral(volume)


def _list_mounts(job: JobSpec, writable: bool = False) -> str:
    volumes = job.recipe.launch.kubernetes.volumes
    mounts = [volume.mount for volume in volumes if not (writable and _is_read_only(volume))]
    return " or ".join(mounts) or ("a writable volume that all pods share" if writable else "a volume")


def _normal(path: str) -> str:
    """Resolve `..` and double slashes of a path without reading this machine's file system."""
    parts: list[str] = []
    for part in PurePosixPath(path).parts[1:]:
        if part == "..":
            del parts[-1:]
        else:
            parts.append(part)
    return "/" + "/".join(parts)


def _describe(job: JobSpec) -> list[str]:
    """Lines for the user about what happens on the cluster and is not in the recipe."""
    recipe = job.recipe
    settings = recipe.launch.kubernetes
    lines = [f"run folder: {find_workdir(job) / str(recipe.run.dir)} in the pods"]
    if find_kind(job).kind == "TrainJob":
        lines.append(
            f"the runtime {settings.runtime} decides whether pods are restarted: a TrainJob cannot request it; "
            "fault.max_restarts applies to processes"
        )
        if settings.kind != "trainjob":
            lines.append(
                f"the runtime {settings.runtime} also has terminationGracePeriodSeconds, by default 30: set it to "
                f"{grace_seconds(job)} there, fault.notice_seconds and half a minute, or pods are killed while saving"
            )
    if settings.kind == "hyperpod":
        lines.append("the image must also contain hyperpod-elastic-agent, the only agent HyperPod's operator supports")
    if settings.kind == "mpijob":
        lines.append(
            "the image must also contain Open MPI and sshd, which the pods start; mpirun ends the ranks at once when "
            "its pod is deleted, so what counts is the newest checkpoint"
        )
    if not {"cpu", "memory"} <= set(build_resources(job).get("limits", {})):
        lines.append(
            f"{_KEY}.cpu and memory are not both set, so the pods are not of Guaranteed quality: they share cores, and "
            "are evicted first where memory runs out"
        )
    if settings.efa_per_node and job.nodes[1] > 1:
        lines.append(
            "EFA: the image must have libfabric and NCCL's plugin aws-ofi-nccl; pods without them train over TCP, many "
            "times slower, and say so"
        )
    if settings.host_network:
        lines.append(f"host_network: port {PORT} must be free on the machines, and rank 0 of two jobs cannot share one")
    if any(volume.host_path is not None for volume in settings.volumes) and job.nodes[1] > 1:
        lines.append("host_path volumes must show the same files on every machine")
    return lines


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
