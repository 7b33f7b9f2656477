"""The manifest of a job: a ConfigMap with the recipe, and an operator's job, whose pods mount the ConfigMap."""

import math
from typing import Any

from echelon.launch.job import JobSpec
from echelon.launch.kubernetes import pod
from echelon.launch.kubernetes.pod import PORT, find_kind, rendezvous_host
from echelon.launch.patch import merge_patch
from echelon.recipe.render import render_recipe
from echelon.recipe.yaml_text import render_documents
from echelon.run.supervise.outcome import REFUSED


def render_manifest(job: JobSpec) -> str:
    """The manifest of a checked job; `kubectl create -f` accepts it too."""
    settings = job.recipe.launch.kubernetes
    # The labels of a patch of the job are the ConfigMap's too.
    given = settings.patch.get("metadata", {}).get("labels")
    labels = merge_patch(pod.build_labels(job), given or {}, "launch.kubernetes.patch.metadata.labels")
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
    replica = {"restartPolicy": "OnFailure" if rounds else "Never", "template": pod.build_template(job)}
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
    container = pod.build_container(job)
    trainer: dict[str, Any] = {name: container[name] for name in ("image", "command", "env") if name in container}
    trainer |= pod.drop_empty({"numNodes": job.nodes[1], "resourcesPerNode": container.get("resources")})
    jobs = [{"name": "node", "template": {"spec": {"template": pod.build_template(job)}}}]
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
        "template": pod.build_template(job, "Never"),
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    return {
        "failurePolicy": {"maxRestarts": job.recipe.fault.max_restarts, "rules": [final]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
    }


def _build_hyperpod(job: JobSpec) -> dict[str, Any]:
    """With a range of machines HyperPod asks the run to save (SIGUSR1) when it adds machines or takes some away."""
    low, high = job.nodes
    elastic = {"minReplicas": low, "maxReplicas": high, "gracefulShutdownTimeoutInSeconds": pod.grace_seconds(job)}
    return {
        "nprocPerNode": str(pod.count_processes(job)),
        "replicaSpecs": [{"name": "pod", "replicas": high, "template": pod.build_template(job)}],
        "runPolicy": {"cleanPodPolicy": "None", "jobMaxRetryCount": job.recipe.fault.max_restarts, **_limits(job)},
        **({"elasticPolicy": elastic} if low < high else {}),
    }


def _build_job(job: JobSpec, spec: dict[str, Any]) -> dict[str, Any]:
    """The operator's job, patched."""
    settings = job.recipe.launch.kubernetes
    kind = find_kind(job)
    labels = pod.build_labels(job)
    if settings.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    metadata: dict[str, Any] = {"name": job.name, "namespace": settings.namespace, "labels": labels}
    if settings.kind == "pytorchjob" and pod.is_on_hyperpod(job) and job.recipe.fault.max_restarts:
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
