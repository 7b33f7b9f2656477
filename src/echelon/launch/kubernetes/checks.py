"""Offline checks of a Kubernetes job: places, GPUs, and features that a job kind does not have.

Names, quantities and the fields of patches are left to the API server, which refuses unknown fields.
"""

import posixpath
from pathlib import PurePosixPath

from echelon.ground.errors import ConfigError, MissingSettingError
from echelon.launch.job import JobSpec, count_gpus, list_inputs
from echelon.launch.kubernetes.manifest import (
    RECIPE_MOUNT,
    SHARED_MEMORY_MOUNT,
    build_resources,
    count_processes,
    find_kind,
    find_workdir,
    requests_efa,
)
from echelon.launch.records import STAMP_LENGTH
from echelon.planner.hardware.gpu_check import check_image_devices
from echelon.planner.replica_limits import refuse_living_on
from echelon.recipe.launch_sections import VolumeConfig

_KEY = "launch.kubernetes"
_POD_NAME_LENGTH = 63
# Paths of the container that a volume must not hide.
_TAKEN = (RECIPE_MOUNT, SHARED_MEMORY_MOUNT, "/", "/proc", "/sys", "/dev")
# Deleted with the pod, or never writable.
_EPHEMERAL = {"emptyDir", "ephemeral", "configMap", "downwardAPI", "gitRepo", "image", "projected", "secret"}


def check_job(job: JobSpec) -> list[str]:
    """Check the job and return lines for the user. Raises ConfigError for the first fault."""
    settings = job.recipe.launch.kubernetes
    if settings.image is None:
        raise MissingSettingError(
            f"{_KEY}.image is not set; give a container image in which echelon is installed.",
            {f"{_KEY}.image": f"SET-{_KEY}.image"},
        )
    _check_kind(job)
    _check_names(job)
    _check_devices(job)
    _check_places(job)
    return _describe(job)


def _check_kind(job: JobSpec) -> None:
    """Refuse settings for which the job kind has no field."""
    settings = job.recipe.launch.kubernetes
    kind = find_kind(job)
    low, high = job.nodes
    if low < high and not kind.is_elastic:
        raise ConfigError(
            f"launch.nodes={job.recipe.launch.nodes}: a {kind.kind} has a fixed number of pods; use "
            f"launch.nodes={high}, or {_KEY}.kind=pytorchjob."
        )
    if settings.kind != "pytorchjob" or high == 1:  # the other operators restart all pods of a job together
        refuse_living_on(job.recipe)
    if settings.kind == "trainjob" and settings.env_from_secrets:
        raise ConfigError(
            f"{_KEY}.env_from_secrets={settings.env_from_secrets}: a TrainJob has no field for it; set it in its "
            f"runtime, or use {_KEY}.kind=jobset."
        )


def _check_names(job: JobSpec) -> None:
    name = find_kind(job).pod.format(name=job.name, last=job.nodes[1] - 1)
    if len(name) > _POD_NAME_LENGTH:
        most = _POD_NAME_LENGTH - (len(name) - len(job.name)) - STAMP_LENGTH
        raise ConfigError(
            f"run.name={job.recipe.run.name}: the pod name {name} would have {len(name)} characters, but Kubernetes "
            f"allows {_POD_NAME_LENGTH}; use a name of at most {most} characters."
        )
    metadata = job.recipe.launch.kubernetes.patch.get("metadata", {})
    for field, key in (("name", "run.name"), ("namespace", f"{_KEY}.namespace")):
        if field in metadata:
            raise ConfigError(
                f"{_KEY}.patch.metadata.{field}={metadata[field]}: echelon could not find the job again; set {key} "
                "instead."
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
    if launch.kubernetes.kind == "hyperpod" and not processes:
        raise ConfigError(
            f"launch.nproc_per_node=auto: {_KEY}.kind=hyperpod without GPUs needs the number of processes per pod; set "
            "launch.nproc_per_node."
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
        if name == "nvidia.com/gpu":
            raise ConfigError(f"{_KEY}.resources.{name}={amount}: set {_KEY}.gpus_per_node instead.")
        if gpus and (name.startswith("nvidia.com/mig-") or name.endswith("/gpu")):
            raise ConfigError(
                f"{_KEY}.resources.{name}={amount}: launch.nproc_per_node or {_KEY}.gpus_per_node already requests "
                f"{gpus} nvidia.com/gpu per pod; set {_KEY}.gpus_per_node to 0."
            )


def _check_places(job: JobSpec) -> None:
    """Check that the run's paths are on volumes: a pod's own disk is deleted with the pod."""
    recipe = job.recipe
    volumes = recipe.launch.kubernetes.volumes
    mounts = [_normal(volume.mount) for volume in volumes]
    for mount in mounts:
        if mount in _TAKEN or mounts.count(mount) > 1:
            raise ConfigError(f"{_KEY}.volumes: {mount} is already in use; mount the volume elsewhere.")
    if not volumes:
        raise MissingSettingError(
            f"{_KEY}.volumes is empty, so run.dir={recipe.run.dir} would be deleted with the pod; mount a volume that "
            "all pods share, such as [{mount: /data, claim: NAME}].",
            {f"{_KEY}.volumes": [{"mount": f"/SET-{_KEY}.volumes", "claim": f"set-{_KEY}.volumes"}]},
        )
    workdir = find_workdir(job)
    if not workdir.is_absolute():
        raise ConfigError(f"{_KEY}.workdir={workdir} is not absolute; give the path of a folder in the container.")
    for key, path in (("run.dir", str(recipe.run.dir)), *list_inputs(recipe)):
        writes = key == "run.dir"
        fit = [volume.mount for volume in volumes if not writes or _keeps_runs(volume)]
        full_path = workdir / path
        if not any(PurePosixPath(_normal(str(full_path))).is_relative_to(_normal(mount)) for mount in fit):
            raise ConfigError(
                f"{key}={path} is {full_path} in the pods, which is not on a {'writable ' * writes}volume; use a path "
                f"below {' or '.join(fit) or 'a writable volume that all pods share'}"
                f"{f', or set {_KEY}.workdir' * writes}."
            )


def _keeps_runs(volume: VolumeConfig) -> bool:
    """Whether a volume can be written, and outlives the pods."""
    return not (volume.read_only or volume.secret_name is not None or _EPHEMERAL.intersection(volume.source or ()))


def _normal(path: str) -> str:
    """Resolve `..` and double slashes of a path without reading this machine's file system."""
    return posixpath.normpath("/" + path.lstrip("/"))


def _describe(job: JobSpec) -> list[str]:
    """Lines for the user about what happens on the cluster and is not in the recipe."""
    recipe = job.recipe
    settings = recipe.launch.kubernetes
    lines = [f"run folder: {find_workdir(job) / str(recipe.run.dir)} in the pods"]
    if find_kind(job).kind == "TrainJob":
        lines.append(
            "its runtime decides whether pods are restarted: a TrainJob cannot request it; fault.max_restarts applies "
            "to processes"
        )
    if settings.kind == "hyperpod":
        lines.append("the image must also contain hyperpod-elastic-agent, the only agent HyperPod's operator supports")
    if not {"cpu", "memory"} <= set(build_resources(job).get("limits", {})):
        lines.append(
            f"{_KEY}.resources does not set both cpu and memory, so the pods are not of Guaranteed quality: they share "
            "cores, and are evicted first where memory runs out"
        )
    if requests_efa(job) and job.nodes[1] > 1:
        lines.append(
            "EFA: the image must have libfabric and NCCL's plugin aws-ofi-nccl; pods without them train over TCP, many "
            "times slower, and say so"
        )
    if any(volume.host_path is not None for volume in settings.volumes) and job.nodes[1] > 1:
        lines.append("host_path volumes must show the same files on every machine")
    return lines
