"""The manifest of a job: a ConfigMap with the recipe, and an operator's job, whose pods mount the ConfigMap.

Its parts: the job kinds of a cluster, the pod with its container, resources and volumes, and the objects around it.
"""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from echelon.ground.variables import asked_environment
from echelon.launch.job import JobSpec, count_gpus, describe_gpu_request
from echelon.launch.patch import merge_patch
from echelon.launch.shell import guard_setup, join_words, needs_shell
from echelon.planner.hardware.instances import INSTANCES, Instance, efa_environment
from echelon.recipe.render import render_recipe
from echelon.recipe.yaml_text import render_documents
from echelon.run.supervise.decision import AWAITS_VARIABLE
from echelon.run.supervise.outcome import REFUSED

PORT = 29400
"""The rendezvous port of a job's pods. Each pod has its own address, so the port is always free."""

RECIPE_MOUNT = "/etc/echelon"
RECIPE_PATH = f"{RECIPE_MOUNT}/recipe.yaml"
SHARED_MEMORY_MOUNT = "/dev/shm"

# Added to fault.notice_seconds: time to kill workers that outlive it, and to flush their writes to the volume.
_LEAVING_SECONDS = 30
# With the name of a machine's type.
_TYPE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
# What Pod Security's profile "restricted" asks of a container, besides runAsNonRoot.
_RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# The fields of the container in which a TrainJob patches that of its runtime; `spec.trainer` has others.
_TRAINJOB_FIELDS = ("name", "volumeMounts", "securityContext")
_HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"


@dataclass(frozen=True)
class JobKind:
    """How one kind is addressed in the API, and the names that its operator gives.

    `operator` is what to install if the cluster does not know the kind. `pods_by` is the label that selects a job's
    pods. `container` is the container that trains, `port` its port, with the name that the operator expects. `pod` and
    `host` are the longest name of a pod, and the name under which all pods reach the first one; they have the fields
    `name` of the job and `last`, the number of its last pod. `is_elastic`: whether the number of pods may change.
    """

    group: str
    version: str
    kind: str
    plural: str
    container: str
    pods_by: str
    operator: str
    pod: str
    host: str
    port: tuple[str, int] = ("rendezvous", PORT)
    is_elastic: bool = False


_JOBSET_POD, _JOBSET_HOST = "{name}-node-0-{last}-xxxxx", "{name}-node-0-0.{name}"
KINDS = {
    "pytorchjob": JobKind(
        "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", "pytorch", "training.kubeflow.org/job-name",
        "Kubeflow's training operator (v1)", "{name}-worker-{last}", "{name}-master-0", ("pytorchjob-port", PORT),
        is_elastic=True,
    ),
    # Its pods are those of a JobSet, which has one service for all of them.
    "trainjob": JobKind(
        "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", "node", "jobset.sigs.k8s.io/jobset-name",
        "Kubeflow Trainer 2.3 or later", _JOBSET_POD, _JOBSET_HOST,
    ),
    "jobset": JobKind(
        "jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "node", "jobset.sigs.k8s.io/jobset-name",
        "JobSet 0.8 or later", _JOBSET_POD, _JOBSET_HOST,
    ),
    # Its operator talks to its agent at the port.
    "hyperpod": JobKind(
        "sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs", "pytorch-job-container", "HPJob",
        "the SageMaker HyperPod training operator", "{name}-pod-{last}", "", ("agent", 8080), is_elastic=True,
    ),
}  # fmt: skip


def find_kind(job: JobSpec) -> JobKind:
    """The kind a job is submitted as."""
    return KINDS[job.recipe.launch.kubernetes.kind]


def rendezvous_host(job: JobSpec) -> str:
    """The host name under which all pods reach the first pod. An elastic PyTorchJob has workers only."""
    low, high = job.nodes
    host = find_kind(job).host.format(name=job.name)
    return host.replace("-master-", "-worker-") if low < high else host


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
    """The container's command. Its process 1 is the agent, so that signals reach it; a shell ends in `exec`.

    In the pods of a PyTorchJob, RANK and WORLD_SIZE count pods; the options of `echelon train` override them.
    HyperPod's operator assigns ranks only to its own agent, which has torchrun's options, and without a shutdown
    timeout kills at once.
    """
    launch, kind = job.recipe.launch, job.recipe.launch.kubernetes.kind
    low, high = job.nodes
    nodes = str(high) if low == high else f"{low}:{high}"
    if kind == "hyperpod":
        argv: tuple[str, ...] = (
            launch.python, "-m", "hyperpod_elastic_agent.run", f"--nnodes={nodes}",
            f"--nproc-per-node={count_processes(job)}", "--rdzv-backend=hyperpod",
            "--shutdown-signal=SIGTERM", f"--shutdown-timeout={math.ceil(job.recipe.fault.notice_seconds)}",
            "--tee=3", "--log-dir=/tmp/hyperpod", "-m", "echelon", "train", RECIPE_PATH,
        )  # fmt: skip
    else:
        argv = (*job.train_command(RECIPE_PATH), "--nodes", nodes, "--rendezvous", f"{rendezvous_host(job)}:{PORT}")
    lines = guard_setup(launch.setup)
    if kind == "trainjob":  # it cannot set the container's working directory
        lines.insert(0, f"cd {shlex.quote(str(find_workdir(job)))} || exit 2")
    if lines or needs_shell(launch):
        argv = ("/bin/bash", "-c", "\n".join([*lines, f"exec {join_words(argv)}"]))
    return [word.replace("$", "$$") for word in argv]  # Kubernetes would expand `$`


def build_env(job: JobSpec) -> list[dict[str, str]]:
    """The container's environment variables, `$` escaped as in the command; those of the recipe win."""
    variables = asked_environment(*_find_asked(job))
    # Operators count each container that ends, so pods wait in place for one that was lost; not under HyperPod's agent.
    if job.recipe.launch.kubernetes.kind != "hyperpod" and job.nodes[1] > 1 and job.recipe.fault.max_restarts > 0:
        variables |= {AWAITS_VARIABLE: "1"}
    # RDMA to GPU memory is requested only where a node selector names a type that has it: with another type libfabric
    # would refuse to start.
    if requests_efa(job):
        instance = find_machine_type(job)
        variables |= {"FI_PROVIDER": "efa"} if instance is None else efa_environment(instance)
    variables |= job.recipe.launch.env
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]


def requests_efa(job: JobSpec) -> bool:
    """Whether the pods request network devices of AWS."""
    return str(job.recipe.launch.kubernetes.resources.get("vpc.amazonaws.com/efa", 0)) != "0"


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
    """The container's resources. Requests equal limits, so with cores and memory it is of Guaranteed quality.

    On a machine of a known type they are 90 % of what its GPUs have of it; the rest is left to the system.
    """
    instance, gpus = find_machine_type(job), count_gpus(job)
    amounts: dict[str, int | str] = {}
    if instance is not None and 0 < gpus <= instance.gpus:
        share = 0.9 * gpus / instance.gpus
        amounts = {"cpu": int(instance.vcpus * share), "memory": f"{int(instance.ram_gib * share)}Gi"}
    amounts |= {"nvidia.com/gpu": gpus, **job.recipe.launch.kubernetes.resources}
    resources = {name: str(amount) for name, amount in amounts.items() if str(amount) != "0"}
    return {"limits": resources, "requests": dict(resources)} if resources else {}


def build_volumes(job: JobSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The pod's volumes, and the container's mounts: the ConfigMap, memory for /dev/shm, and those of the recipe."""
    settings = job.recipe.launch.kubernetes
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "recipe", "mountPath": RECIPE_MOUNT, "readOnly": True},
        {"name": "shared-memory", "mountPath": SHARED_MEMORY_MOUNT},
    ]
    for index, volume in enumerate(settings.volumes):
        sources = {
            "persistentVolumeClaim": {"claimName": volume.claim},
            "hostPath": {"path": volume.host_path},
            "secret": {"secretName": volume.secret_name},
        }
        named = {source: name for source, name in sources.items() if None not in name.values()}
        volumes.append({"name": f"volume-{index}", **(volume.source or named)})
        mount = {"mountPath": volume.mount, "subPath": volume.sub_path, "readOnly": volume.read_only or None}
        mounts.append({"name": f"volume-{index}", **drop_empty(mount)})
    return volumes, mounts


def is_on_hyperpod(job: JobSpec) -> bool:
    """Whether the job runs on HyperPod: by its kind, or by the node label that a PyTorchJob selects."""
    return job.recipe.launch.kubernetes.kind == "hyperpod" or _HEALTH_LABEL in _patched(job, "nodeSelector")


def _patched(job: JobSpec, field: str) -> dict[str, Any]:
    """A field of the pods' `spec` in `pod_patch`; empty if there is no mapping."""
    value = job.recipe.launch.kubernetes.pod_patch.get("spec", {}).get(field)
    return value if isinstance(value, dict) else {}


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
    context = next((entry.get("securityContext") or {} for entry in containers if entry["name"] == name), {})
    is_restricted = {**pod, **context}.get("runAsNonRoot") is True
    return {name: value for name, value in _RESTRICTED.items() if is_restricted and name not in pod}


def build_container(job: JobSpec) -> dict[str, Any]:
    """The container that trains."""
    settings = job.recipe.launch.kubernetes
    kind = find_kind(job)
    container: dict[str, Any] = {
        "name": kind.container,
        "image": settings.image,
        "command": build_command(job),
        "workingDir": str(find_workdir(job)),
        "env": build_env(job),
        "envFrom": [{"secretRef": {"name": name}} for name in settings.env_from_secrets],
        "ports": [dict(zip(("name", "containerPort"), kind.port, strict=True))],
        "resources": build_resources(job),
        "volumeMounts": build_volumes(job)[1],
        "securityContext": build_container_security(job),
    }
    return drop_empty(container)


def build_template(job: JobSpec, restart_policy: str | None = None) -> dict[str, Any]:
    """The template of the pods, patched. A TrainJob's is itself a patch of that of its runtime."""
    settings = job.recipe.launch.kubernetes
    spec = drop_empty({"terminationGracePeriodSeconds": grace_seconds(job), "restartPolicy": restart_policy})
    spec |= build_placement(job)
    containers, volumes = [build_container(job)], build_volumes(job)[0]
    if settings.kind == "trainjob":
        kept = {name: containers[0][name] for name in _TRAINJOB_FIELDS if name in containers[0]}
        spec |= {"volumes": volumes, "containers": [kept]}
    else:
        # The token of the API is for a named account; HyperPod's agent may use it.
        if "serviceAccountName" not in settings.pod_patch.get("spec", {}) and settings.kind != "hyperpod":
            spec["automountServiceAccountToken"] = False
        spec |= {"containers": containers, "volumes": volumes}
    template = {"metadata": {"labels": build_labels(job)}, "spec": spec}
    return patch_template(job, template)


def patch_template(job: JobSpec, template: dict[str, Any]) -> dict[str, Any]:
    """A pod template with `launch.kubernetes.pod_patch` merged into it."""
    pod_patch = job.recipe.launch.kubernetes.pod_patch
    patched: dict[str, Any] = merge_patch(template, pod_patch, "launch.kubernetes.pod_patch")
    return patched


def drop_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value; 0 and False are values."""
    return {name: value for name, value in fields.items() if value is not None and value != [] and value != {}}


def build_labels(job: JobSpec) -> dict[str, str]:
    """Labels of all objects of a job, as in `kubectl get all -l app.kubernetes.io/instance=NAME`."""
    return {"app.kubernetes.io/name": "echelon", "app.kubernetes.io/instance": job.name}


def render_manifest(job: JobSpec) -> str:
    """The manifest of a checked job; `kubectl create -f` accepts it too."""
    settings = job.recipe.launch.kubernetes
    # The labels of a patch of the job are the ConfigMap's too.
    given = settings.patch.get("metadata", {}).get("labels")
    labels = merge_patch(build_labels(job), given or {}, "launch.kubernetes.patch.metadata.labels")
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-recipe", "namespace": settings.namespace, "labels": labels},
        "data": {"recipe.yaml": render_recipe(job.recipe)},
    }
    build = {
        "pytorchjob": _build_pytorchjob,
        "trainjob": _build_trainjob,
        "jobset": _build_jobset,
        "hyperpod": _build_hyperpod,
    }
    return render_documents([config_map, _build_job(job, build[settings.kind](job))])


def _build_pytorchjob(job: JobSpec) -> dict[str, Any]:
    """Fixed size: a master and workers. Elastic: only workers, any of which may be missing.

    Restarts: ExitCode would treat code 1 as permanent, and Never would fail the job at the first lost pod. The operator
    fails the job when the restarts of all pods reach the limit; a job's pods restart together. The pod that replaces an
    evicted one counts from 0, and the others wait for it in place.
    """
    low, high = job.nodes
    rounds = job.recipe.fault.max_restarts
    replica = {"restartPolicy": "OnFailure" if rounds else "Never", "template": build_template(job)}
    policy: dict[str, Any] = {
        # Keeps ended pods for `echelon logs`, and removes those still running.
        "cleanPodPolicy": "Running",
        **({"backoffLimit": rounds * high + 1} if rounds else {}),
        **_limits(job),
    }
    counts, elastic = {"Master": 1, "Worker": high - 1}, {}
    if low < high:
        policy["schedulingPolicy"] = {"minAvailable": low}  # a gang scheduler may start with fewer
        host = {"rdzvBackend": "c10d", "rdzvHost": rendezvous_host(job), "rdzvPort": PORT}
        counts, elastic = {"Worker": high}, {"elasticPolicy": {"minReplicas": low, "maxReplicas": high, **host}}
    replicas = {name: {"replicas": count, **replica} for name, count in counts.items() if count}
    return {"runPolicy": policy, **elastic, "pytorchReplicaSpecs": replicas}


def _build_trainjob(job: JobSpec) -> dict[str, Any]:
    """The pod template comes from the runtime; the job patches the fields that it may."""
    container = build_container(job)
    trainer: dict[str, Any] = {name: container[name] for name in ("image", "command", "env") if name in container}
    trainer |= drop_empty({"numNodes": job.nodes[1], "resourcesPerNode": container.get("resources")})
    jobs = [{"name": "node", "template": {"spec": {"template": build_template(job)}}}]
    # A patch of the runtime names its manager; the operator wants a path after a domain.
    patch = {"manager": "echelon/launch", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    return {"runtimeRef": runtime, "trainer": trainer, "runtimePatches": [patch], **_limits(job)}


def _build_jobset(job: JobSpec) -> dict[str, Any]:
    """A JobSet with one indexed Job. A failed pod restarts all, unless it was refused, or evicted: the rest waits."""
    refused = {"operator": "In", "values": [REFUSED], "containerName": find_kind(job).container}
    rules = [
        {"action": "FailJob", "onExitCodes": refused},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    nodes = {
        "parallelism": job.nodes[1],
        "completions": job.nodes[1],
        "completionMode": "Indexed",
        "backoffLimit": 0,
        **_limits(job),
        "podFailurePolicy": {"rules": rules},
        "template": build_template(job, "Never"),
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    return {
        "failurePolicy": {"maxRestarts": job.recipe.fault.max_restarts, "rules": [final]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
    }


def _build_hyperpod(job: JobSpec) -> dict[str, Any]:
    """With a range of machines HyperPod asks the run to save (SIGUSR1) when it adds machines or takes some away."""
    low, high = job.nodes
    elastic = {"minReplicas": low, "maxReplicas": high, "gracefulShutdownTimeoutInSeconds": grace_seconds(job)}
    return {
        "nprocPerNode": str(count_processes(job)),
        "replicaSpecs": [{"name": "pod", "replicas": high, "template": build_template(job)}],
        "runPolicy": {"cleanPodPolicy": "None", "jobMaxRetryCount": job.recipe.fault.max_restarts, **_limits(job)},
        **({"elasticPolicy": elastic} if low < high else {}),
    }


def _build_job(job: JobSpec, spec: dict[str, Any]) -> dict[str, Any]:
    """The operator's job, patched."""
    settings = job.recipe.launch.kubernetes
    kind = find_kind(job)
    labels = build_labels(job)
    if settings.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    metadata: dict[str, Any] = {"name": job.name, "namespace": settings.namespace, "labels": labels}
    if settings.kind == "pytorchjob" and is_on_hyperpod(job) and job.recipe.fault.max_restarts:
        metadata["annotations"] = {
            "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
            "sagemaker.amazonaws.com/job-max-retry-count": str(job.recipe.fault.max_restarts),
        }
    body = {"apiVersion": f"{kind.group}/{kind.version}", "kind": kind.kind, "metadata": metadata, "spec": spec}
    patched: dict[str, Any] = merge_patch(body, settings.patch, "launch.kubernetes.patch")
    return patched


def _limits(job: JobSpec) -> dict[str, int]:
    """The time limit of the job."""
    hours = job.recipe.launch.max_hours
    return {} if hours is None else {"activeDeadlineSeconds": math.ceil(hours * 3600)}
