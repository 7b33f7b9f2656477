"""The status of a job, from the API objects of the job and its pods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.launch.job import JobState, JobStatus
from echelon.launch.job_logs import name_ending
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED

# Normal reasons while a pod starts.
_STARTING = ("ContainerCreating", "PodInitializing")
_DONE = ("Succeeded", "Complete", "Completed")
_RANK_LABELS = ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index")
_ROLE_LABEL = "training.kubeflow.org/replica-type"


@dataclass(frozen=True)
class PodState:
    """One pod. `start` identifies a start of its container, None before the first; `trouble` is why it does not run."""

    name: str
    running: bool
    start: tuple[str, int] | None
    exit_code: int | None
    trouble: str


def read_pods(pods: Sequence[Mapping[str, Any]], container: str) -> list[PodState]:
    """The pods of a job; rank 0 is first."""
    return [_read_pod(pod, container) for pod in sorted(pods, key=_rank)]


def _rank(pod: Mapping[str, Any]) -> tuple[bool, int, str]:
    labels = pod["metadata"].get("labels") or {}
    index = next((labels[name] for name in _RANK_LABELS if name in labels), "0")
    return labels.get(_ROLE_LABEL) != "master", int(index), pod["metadata"]["name"]


def _read_pod(pod: Mapping[str, Any], container: str) -> PodState:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    seen = {row["name"]: row for row in status.get("containerStatuses") or []}.get(container, {})
    state = seen.get("state") or {}
    ended = state.get("terminated") or (seen.get("lastState") or {}).get("terminated")
    has_started = "running" in state or ended is not None
    return PodState(
        name=name,
        running="running" in state,
        start=(pod["metadata"].get("uid", ""), seen.get("restartCount", 0)) if has_started else None,
        exit_code=None if ended is None or "running" in state else int(ended["exitCode"]),
        trouble=_find_trouble(status),
    )


def _find_trouble(status: Mapping[str, Any]) -> str:
    """Why the pod does not run, in Kubernetes' terms: Unschedulable, ImagePullBackOff, CrashLoopBackOff, Evicted."""
    for row in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (row.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _STARTING:
            ended = (row.get("lastState") or {}).get("terminated") or {}
            code = f" after exit code {ended['exitCode']}" if "exitCode" in ended else ""
            return _join(f"{waiting['reason']}{code}", waiting.get("message"))
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _join(condition.get("reason"), condition.get("message"))
    return _join(status.get("reason"), status.get("message"))


def _join(reason: str | None, message: str | None) -> str:
    return ": ".join(" ".join(part.split()) for part in (reason, message) if part)


def judge(job: Mapping[str, Any] | None, pods: Sequence[PodState]) -> JobStatus:
    """The status from the job's conditions and its pods. A missing job was deleted, after it could save."""
    if job is None:
        leaving = [pod for pod in pods if pod.running]
        if leaving:
            return JobStatus("running", f"deleted; {len(leaving)} of {len(pods)} pods are saving and shutting down")
        return JobStatus("stopped", "no longer in the cluster", STOPPED)
    now = _find_conditions(job)
    if any(name in now for name in _DONE):
        return JobStatus("done", "", DONE)
    if "Failed" in now:
        return _judge_failure(now["Failed"], pods)
    if "Suspended" in now:
        message = _join(None, now["Suspended"].get("message"))
        return JobStatus("queued", f"suspended: {message or 'waiting in a queue'}")
    running = sum(pod.running for pod in pods)
    state: JobState = "running" if running else "queued"
    return JobStatus(state, _describe(running, pods))


def _find_conditions(job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The conditions of a job that are true now, by type."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return {condition["type"]: condition for condition in conditions if condition["status"] == "True"}


def _judge_failure(condition: Mapping[str, Any], pods: Sequence[PodState]) -> JobStatus:
    """The status of a failed job, from its pods' exit codes; at launch.max_hours the operator deletes the pods."""
    detail = _join(condition.get("reason"), condition.get("message"))
    codes = [pod.exit_code for pod in pods if pod.exit_code not in (None, DONE)]
    out_of_time = condition.get("reason") == "DeadlineExceeded" or "specified deadline" in detail
    code = codes[0] if codes else STOPPED if out_of_time else FAILED
    return JobStatus(name_ending(code), detail, code)


def _describe(running: int, pods: Sequence[PodState]) -> str:
    parts = [f"{running} of {len(pods)} pods running" if pods else "no pods yet"]
    troubled = [pod for pod in pods if pod.trouble and not pod.running]
    if troubled:
        more = f", and {len(troubled) - 1} more" if len(troubled) > 1 else ""
        parts.append(f"{troubled[0].name}: {troubled[0].trouble}{more}")
    return "; ".join(parts)
