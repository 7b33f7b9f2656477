"""The manifest of a job: a ConfigMap with the recipe, and an operator's job, whose pods mount the ConfigMap."""

import math
from typing import Any

from echelon.launch.job import JobSpec
from echelon.launch.kubernetes.kinds import PORT, find_kind, is_elastic, rendezvous_host
from echelon.launch.kubernetes.pod import (
    build_command,
    build_container_security,
    build_env,
    build_labels,
    build_mounts,
    build_placement,
    build_resources,
    build_template,
    build_volumes,
    config_map_name,
    count_processes,
    grace_seconds,
    is_on_hyperpod,
    patch_template,
)
from echelon.launch.patch import merge_patch
from echelon.recipe.render import render_recipe
from echelon.recipe.yaml_text import render_documents
from echelon.run.supervise.outcome import REFUSED

# A patch of a TrainJob's runtime names its manager; the operator wants a path after a domain.
_SIGNATURE = "echelon/launch"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def render_manifest(job: JobSpec) -> str:
    """The manifest of a checked job; `kubectl create -f` accepts it too."""
    build = {
        "PyTorchJob": _build_pytorchjob,
        "TrainJob": _build_trainjob,
        "JobSet": _build_jobset,
        "HyperPodPyTorchJob": _build_hyperpod,
    }
    return render_documents([_build_config_map(job), build[find_kind(job).kind](job)])


def _build_config_map(job: JobSpec) -> dict[str, Any]:
    """The recipe; the labels of a patch of the job are its own too."""
    settings = job.recipe.launch.kubernetes
    given = settings.patch.get("metadata", {}).get("labels")
    labels = merge_patch(build_labels(job), given or {}, "launch.kubernetes.patch.metadata.labels")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config_map_name(job), "namespace": settings.namespace, "labels": labels},
        "data": {"recipe.yaml": render_recipe(job.recipe)},
    }


def _build_pytorchjob(job: JobSpec) -> dict[str, Any]:
    """Fixed size: a master and workers. Elastic: only workers, any of which may be missing."""
    low, high = job.nodes
    replica = {"restartPolicy": _restart_policy(job), "template": build_template(job)}
    if is_elastic(job):
        host = {"rdzvBackend": "c10d", "rdzvHost": rendezvous_host(job), "rdzvPort": PORT}
        elastic = {"elasticPolicy": {"minReplicas": low, "maxReplicas": high, **host}}
        replicas = {"Worker": {"replicas": high, **replica}}
    else:
        elastic = {}
        replicas = {"Master": {"replicas": 1, **replica}}
        if high > 1:
            replicas["Worker"] = {"replicas": high - 1, **replica}
    policy = {
        # Keeps ended pods for `echelon logs`, and removes those still running.
        "cleanPodPolicy": "Running",
        **_backoff_limit(job),
        **_limits(job),
    }
    # A gang scheduler may start with fewer.
    gang = {"schedulingPolicy": {"minAvailable": low}} if is_elastic(job) else {}
    return _build_job(job, {"runPolicy": {**policy, **gang}, **elastic, "pytorchReplicaSpecs": replicas})


def _restart_policy(job: JobSpec) -> str:
    """OnFailure: ExitCode would treat code 1 as permanent, and Never would fail the job at the first lost pod."""
    return "OnFailure" if job.recipe.fault.max_restarts else "Never"


def _backoff_limit(job: JobSpec) -> dict[str, int]:
    """The operator fails the job when the restarts of all pods reach this limit; a job's pods restart together.

    The pod that replaces an evicted one counts from 0, and the others wait for it in place.
    """
    rounds = job.recipe.fault.max_restarts
    return {"backoffLimit": rounds * job.nodes[1] + 1} if rounds else {}


def _build_trainjob(job: JobSpec) -> dict[str, Any]:
    """The pod template comes from the runtime; the job patches the fields that it may."""
    settings = job.recipe.launch.kubernetes
    trainer: dict[str, Any] = {
        "image": settings.image,
        "command": build_command(job),
        "env": build_env(job),
        "numNodes": job.nodes[1],
        "resourcesPerNode": build_resources(job),
    }
    container: dict[str, Any] = {"name": find_kind(job).container, "volumeMounts": build_mounts(job)}
    if security := build_container_security(job):
        container["securityContext"] = security
    pod = {
        "terminationGracePeriodSeconds": grace_seconds(job),
        **build_placement(job),
        "volumes": build_volumes(job),
        "containers": [container],
    }
    template = patch_template(job, {"metadata": {"labels": build_labels(job)}, "spec": pod})
    jobs = [{"name": "node", "template": {"spec": {"template": template}}}]
    spec = {"template": {"spec": {"replicatedJobs": jobs}}}
    return _build_job(
        job,
        {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {name: value for name, value in trainer.items() if value},
            "runtimePatches": [{"manager": _SIGNATURE, "trainingRuntimeSpec": spec}],
            **_limits(job),
        },
    )


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
    return _build_job(
        job,
        {
            "failurePolicy": {"maxRestarts": job.recipe.fault.max_restarts, "rules": [final]},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
        },
    )


def _build_hyperpod(job: JobSpec) -> dict[str, Any]:
    """With a range of machines HyperPod asks the run to save (SIGUSR1) when it adds machines or takes some away."""
    low, high = job.nodes
    notice = grace_seconds(job)
    elastic = {"minReplicas": low, "maxReplicas": high, "gracefulShutdownTimeoutInSeconds": notice}
    policy = {
        "cleanPodPolicy": "None",
        "jobMaxRetryCount": job.recipe.fault.max_restarts,
        **_limits(job),
    }
    return _build_job(
        job,
        {
            "nprocPerNode": str(count_processes(job)),
            "replicaSpecs": [{"name": "pod", "replicas": high, "template": build_template(job)}],
            "runPolicy": policy,
            **({"elasticPolicy": elastic} if is_elastic(job) else {}),
        },
    )


def _build_job(job: JobSpec, spec: dict[str, Any]) -> dict[str, Any]:
    settings = job.recipe.launch.kubernetes
    kind = find_kind(job)
    labels = build_labels(job)
    if settings.queue is not None:
        labels[_QUEUE_LABEL] = settings.queue
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
