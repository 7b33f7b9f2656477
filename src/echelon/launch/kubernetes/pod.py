"""The pod of a job: its container with command, resources and volumes."""

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from echelon.ground.variables import asked_environment
from echelon.launch.job import JobSpec, count_gpus, describe_gpu_request
from echelon.launch.kubernetes.kinds import PORT, find_kind, rendezvous_host
from echelon.launch.patch import merge_patch
from echelon.launch.shell import guard_setup, join_words, needs_shell
from echelon.planner.hardware.instances import INSTANCES, Instance, efa_environment
from echelon.run.supervise.restart import AWAITS_VARIABLE

RECIPE_MOUNT = "/etc/echelon"
RECIPE_PATH = f"{RECIPE_MOUNT}/recipe.yaml"
SHARED_MEMORY_MOUNT = "/dev/shm"

# Added to fault.notice_seconds: time to kill workers that outlive it, and to flush their writes to the volume.
_LEAVING_SECONDS = 30
# With the name of a machine's type.
_TYPE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_USED_SHARE = 0.9
# What Pod Security's profile "restricted" asks of a container, besides runAsNonRoot.
_RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_EFA = "vpc.amazonaws.com/efa"
_HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"


def config_map_name(job: JobSpec) -> str:
    """The name of the ConfigMap with the job's recipe."""
    return f"{job.name}-recipe"


def grace_seconds(job: JobSpec) -> int:
    """Seconds between SIGTERM and SIGKILL."""
    return math.ceil(job.recipe.fault.notice_seconds) + _LEAVING_SECONDS


def find_workdir(job: JobSpec) -> PurePosixPath:
    """The folder in the pods that relative paths of the recipe start from. Requires at least one volume."""
    settings = job.recipe.launch.kubernetes
    return PurePosixPath(settings.workdir or settings.volumes[0].mount)


def count_processes(job: JobSpec) -> int:
    """The number of processes per pod; 0 if the recipe does not determine it."""
    nproc = job.recipe.launch.nproc_per_node
    return nproc if isinstance(nproc, int) else count_gpus(job)


def build_command(job: JobSpec) -> list[str]:
    """The container's command. Its process 1 is the agent, so that signals reach it.

    In the pods of a PyTorchJob, RANK and WORLD_SIZE count pods; the options of `echelon train` override them.
    HyperPod's operator assigns ranks only to its own agent, so there that agent starts the workers.
    """
    if job.recipe.launch.kubernetes.kind == "hyperpod":
        return _wrap(job, _hyperpod_command(job))
    low, high = job.nodes
    nodes = str(high) if low == high else f"{low}:{high}"
    options = ("--nodes", nodes, "--rendezvous", f"{rendezvous_host(job)}:{PORT}")
    return _wrap(job, (*job.train_command(RECIPE_PATH), *options))


def _hyperpod_command(job: JobSpec) -> tuple[str, ...]:
    """HyperPod's launcher, with torchrun's options and a shutdown timeout; without one it kills at once."""
    launch = job.recipe.launch
    low, high = job.nodes
    nodes = str(high) if low == high else f"{low}:{high}"
    return (
        launch.python, "-m", "hyperpod_elastic_agent.run", f"--nnodes={nodes}",
        f"--nproc-per-node={count_processes(job)}", "--rdzv-backend=hyperpod",
        "--shutdown-signal=SIGTERM", f"--shutdown-timeout={math.ceil(job.recipe.fault.notice_seconds)}",
        "--tee=3", "--log-dir=/tmp/hyperpod", "-m", "echelon", "train", RECIPE_PATH,
    )  # fmt: skip


def _wrap(job: JobSpec, argv: tuple[str, ...]) -> list[str]:
    """The command for Kubernetes; if a shell is needed, it ends in `exec`, so that the agent replaces the shell.

    A TrainJob cannot set the container's working directory.
    """
    lines = guard_setup(job.recipe.launch.setup)
    if find_kind(job).kind == "TrainJob":
        lines.insert(0, f"cd {shlex.quote(str(find_workdir(job)))} || exit 2")
    if lines or needs_shell(job.recipe.launch):
        argv = ("/bin/bash", "-c", "\n".join([*lines, f"exec {join_words(argv)}"]))
    return [escape(word) for word in argv]


def escape(text: str) -> str:
    """Escape `$` in a command or variable as `$$`, so that Kubernetes does not expand it."""
    return text.replace("$", "$$")


def build_env(job: JobSpec) -> list[dict[str, str]]:
    """The container's environment variables; those of the recipe win."""
    awaits = {AWAITS_VARIABLE: "1"} if awaits_pods(job) else {}
    variables = {**asked_environment(*_find_asked(job)), **awaits, **_efa_variables(job), **job.recipe.launch.env}
    return [{"name": name, "value": escape(value)} for name, value in variables.items()]


def awaits_pods(job: JobSpec) -> bool:
    """Whether the pods of a job wait in place for one that was lost: operators count each container that ends."""
    is_ours = job.recipe.launch.kubernetes.kind != "hyperpod"  # its own agent starts the ranks
    return is_ours and job.nodes[1] > 1 and job.recipe.fault.max_restarts > 0


def _efa_variables(job: JobSpec) -> dict[str, str]:
    """Variables that make libfabric use EFA, if pods request it.

    RDMA to GPU memory is requested only where a node selector names a type that has it: with another type libfabric
    would refuse to start.
    """
    if not requests_efa(job):
        return {}
    instance = find_machine_type(job)
    return {"FI_PROVIDER": "efa"} if instance is None else efa_environment(instance)


def requests_efa(job: JobSpec) -> bool:
    """Whether the pods request network devices of AWS."""
    return str(job.recipe.launch.kubernetes.resources.get(_EFA, 0)) != "0"


def find_machine_type(job: JobSpec) -> Instance | None:
    """The type of AWS's catalogue that the node selector names."""
    labels = _patched(job, "nodeSelector")
    named = (f"ml.{labels[label].removeprefix('ml.')}" for label in _TYPE_LABELS if label in labels)
    return next((INSTANCES[name] for name in named if name in INSTANCES), None)


def _find_asked(job: JobSpec) -> tuple[int, str]:
    """The number of GPUs per pod that a process can see, and the key that asks for them."""
    if count := count_gpus(job):
        return count, describe_gpu_request(job)
    for name, amount in job.recipe.launch.kubernetes.resources.items():
        if re.match(r"nvidia\.com/(gpu|mig-)|.*/gpu$", name) and str(amount) != "0":
            return 1, f"launch.kubernetes.resources.{name}={amount}"  # a process sees one of several parts of a GPU
    return 0, ""


def build_resources(job: JobSpec) -> dict[str, Any]:
    """The container's resources. Requests equal limits, so with cores and memory it is of Guaranteed quality."""
    settings = job.recipe.launch.kubernetes
    amounts = {**_share_machine(job), "nvidia.com/gpu": count_gpus(job), **settings.resources}
    given = {name: str(amount) for name, amount in amounts.items() if str(amount) != "0"}
    return {"limits": given, "requests": dict(given)} if given else {}


def _share_machine(job: JobSpec) -> dict[str, str]:
    """Cores and memory of a machine of a known type, in proportion to its GPUs; the rest is left to the system."""
    instance, gpus = find_machine_type(job), count_gpus(job)
    if instance is None or not 0 < gpus <= instance.gpus:
        return {}
    share = _USED_SHARE * gpus / instance.gpus
    return {"cpu": str(int(instance.vcpus * share)), "memory": f"{int(instance.ram_gib * share)}Gi"}


def build_volumes(job: JobSpec) -> list[dict[str, Any]]:
    """The pod's volumes: the ConfigMap, memory for /dev/shm, and the volumes in the recipe."""
    settings = job.recipe.launch.kubernetes
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": config_map_name(job)}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
    ]
    for index, volume in enumerate(settings.volumes):
        source: dict[str, Any]
        if volume.claim is not None:
            source = {"persistentVolumeClaim": {"claimName": volume.claim}}
        elif volume.host_path is not None:
            source = {"hostPath": {"path": volume.host_path}}
        elif volume.secret_name is not None:
            source = {"secret": {"secretName": volume.secret_name}}
        else:
            source = volume.source or {}
        volumes.append({"name": f"volume-{index}", **source})
    return volumes


def build_mounts(job: JobSpec) -> list[dict[str, Any]]:
    """The container's volume mounts."""
    mounts: list[dict[str, Any]] = [
        {"name": "recipe", "mountPath": RECIPE_MOUNT, "readOnly": True},
        {"name": "shared-memory", "mountPath": SHARED_MEMORY_MOUNT},
    ]
    for index, volume in enumerate(job.recipe.launch.kubernetes.volumes):
        read_only = {"readOnly": True} if volume.read_only else {}
        sub_path = {"subPath": volume.sub_path} if volume.sub_path is not None else {}
        mounts.append({"name": f"volume-{index}", "mountPath": volume.mount, **sub_path, **read_only})
    return mounts


def is_on_hyperpod(job: JobSpec) -> bool:
    """Whether the job runs on HyperPod: by its kind, or by the node label that a PyTorchJob selects."""
    return job.recipe.launch.kubernetes.kind == "hyperpod" or _HEALTH_LABEL in _patched(job, "nodeSelector")


def _patched(job: JobSpec, field: str) -> dict[str, Any]:
    """A field of the pods' `spec` in `pod_patch`; empty if there is no mapping."""
    found = job.recipe.launch.kubernetes.pod_patch.get("spec", {}).get(field)
    return found if isinstance(found, dict) else {}


def build_placement(job: JobSpec) -> dict[str, Any]:
    """The pod's machines and security before the patch; HyperPod's label avoids machines in repair."""
    placement = {}
    if job.recipe.launch.kubernetes.kind == "hyperpod":
        placement["nodeSelector"] = {_HEALTH_LABEL: "Schedulable"}
    if "fsGroup" in _patched(job, "securityContext"):  # else each start changes the owner of every file of the volumes
        placement["securityContext"] = {"fsGroupChangePolicy": "OnRootMismatch"}
    return placement


def build_container_security(job: JobSpec) -> dict[str, Any]:
    """The container's securityContext before the patch: that of the restricted profile for pods that are not of root.

    A container of root would then not be able to write to the folders of others, or to install packages.
    """
    name, pod = find_kind(job).container, _patched(job, "securityContext")
    containers = patch_template(job, {"spec": {"containers": [{"name": name}]}})["spec"]["containers"]
    own = next((entry.get("securityContext") or {} for entry in containers if entry["name"] == name), {})
    is_restricted = {**pod, **own}.get("runAsNonRoot") is True
    return {name: value for name, value in _RESTRICTED.items() if is_restricted and name not in pod}


def build_template(job: JobSpec, restart_policy: str | None = None) -> dict[str, Any]:
    """The template of the pods that train; a TrainJob's runtime has its own, which is patched."""
    settings = job.recipe.launch.kubernetes
    kind = find_kind(job)
    # The token of the API is for a named account; HyperPod's agent may use it.
    has_token = "serviceAccountName" in settings.pod_patch.get("spec", {}) or settings.kind == "hyperpod"
    container: dict[str, Any] = {
        "name": kind.container,
        "image": settings.image,
        "command": build_command(job),
        "workingDir": str(find_workdir(job)),
        "env": build_env(job),
        "envFrom": [{"secretRef": {"name": name}} for name in settings.env_from_secrets],
        "ports": [dict(zip(("name", "containerPort"), kind.port, strict=True))],
        "resources": build_resources(job),
        "volumeMounts": build_mounts(job),
        "securityContext": build_container_security(job),
    }
    template = {
        "metadata": {"labels": build_labels(job)},
        "spec": {
            "terminationGracePeriodSeconds": grace_seconds(job),
            **({} if restart_policy is None else {"restartPolicy": restart_policy}),
            **build_placement(job),
            **({} if has_token else {"automountServiceAccountToken": False}),
            "containers": [{name: value for name, value in container.items() if value}],
            "volumes": build_volumes(job),
        },
    }
    return patch_template(job, template)


def patch_template(job: JobSpec, template: dict[str, Any]) -> dict[str, Any]:
    """The pod template with `launch.kubernetes.pod_patch` merged into it."""
    patched: dict[str, Any] = merge_patch(
        template, job.recipe.launch.kubernetes.pod_patch, "launch.kubernetes.pod_patch"
    )
    return patched


def build_labels(job: JobSpec) -> dict[str, str]:
    """Labels of all objects of a job, as in `kubectl get all -l app.kubernetes.io/instance=NAME`."""
    return {"app.kubernetes.io/name": "echelon", "app.kubernetes.io/instance": job.name}
