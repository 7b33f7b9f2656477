"""`--to kubernetes`: submit a job's manifest; query, read and cancel the job, with the official client."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import yaml
from typing_extensions import override

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.extras import missing_package
from echelon.ground.stored import read_text
from echelon.launch.job import FINAL_STATES, NAME, JobRecord, JobSpec, JobStatus, Launcher, RecordForm, Submitted
from echelon.launch.kubernetes.checks import check_job
from echelon.launch.kubernetes.manifest import KINDS, JobKind, render_manifest
from echelon.launch.records import name_ending
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.yaml_text import shorten
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED

_LIMIT: Mapping[str, Any] = {"_request_timeout": (10, 60)}  # seconds: to connect, to answer
_LONGEST_MESSAGE = 400
# Normal reasons while a pod starts.
_STARTING = ("ContainerCreating", "PodInitializing")
_DONE = ("Succeeded", "Complete", "Completed")
_RANK_LABELS = ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index")
_ROLE_LABEL = "training.kubeflow.org/replica-type"
_MANIFEST = "manifest.yaml"
_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class PodState:
    """One pod. `start` identifies a start of its container, None before the first; `trouble` is why it does not run."""

    name: str
    running: bool
    start: tuple[str, int] | None
    exit_code: int | None
    trouble: str


class KubernetesCluster:
    """A namespace of the cluster of a kubeconfig context, for jobs of one kind; None is the current context."""

    def __init__(self, context: str | None, kind: JobKind, namespace: str) -> None:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise missing_package("launch.to=kubernetes", "kubernetes", "kubernetes") from error
        try:
            _, current = config.list_kube_config_contexts()
            self.context = context or str(current["name"])
            api = config.new_client_from_config(context=self.context)
        except config.ConfigException as error:
            raise ConfigError(
                f"launch.kubernetes.context={context or 'null, the current one'}: not found in the kubeconfig "
                f"({_shorten(str(error))}); see `kubectl config get-contexts`."
            ) from error
        self.kind, self._namespace = kind, namespace
        self._place = (kind.group, kind.version, namespace, kind.plural)
        self._core = client.CoreV1Api(api)
        self._jobs = client.CustomObjectsApi(api)

    def create_job(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create the job and return it as the API server answers. Unknown fields are refused."""
        with _explained(self.context, self.kind):
            create = self._jobs.create_namespaced_custom_object
            return dict(create(*self._place, dict(body), field_validation="Strict", **_LIMIT))

    def create_config_map(self, body: Mapping[str, Any]) -> None:
        """Create a ConfigMap."""
        with _explained(self.context):
            self._core.create_namespaced_config_map(self._namespace, dict(body), **_LIMIT)

    def find_job(self, name: str) -> dict[str, Any] | None:
        """The job; None if there is no job of that name."""
        with _explained(self.context, self.kind, may_be_gone=True):
            return dict(self._jobs.get_namespaced_custom_object(*self._place, name, **_LIMIT))
        return None

    def delete_job(self, name: str) -> bool:
        """Delete the job and, in the background, its dependents; each pod gets SIGTERM. False if there is none."""
        with _explained(self.context, self.kind, may_be_gone=True):
            delete = self._jobs.delete_namespaced_custom_object
            delete(*self._place, name, propagation_policy="Background", **_LIMIT)
            return True
        return False

    def list_pods(self, name: str) -> list[PodState]:
        """The pods of a job; rank 0 is first."""
        with _explained(self.context):
            select = f"{self.kind.pods_by}={name}"
            answer = self._core.list_namespaced_pod(
                self._namespace, label_selector=select, _preload_content=False, **_LIMIT
            )
        return _read_pods(json.loads(answer.data)["items"], self.kind.container)

    def read_log(self, pod: str, follow: bool) -> Iterator[str]:
        """Yield the lines that the container of a pod has printed; with `follow`, also new lines until it ends."""
        options = {} if follow else _LIMIT
        with _explained(self.context):
            answer = self._core.read_namespaced_pod_log(
                pod, self._namespace, container=self.kind.container, follow=follow, _preload_content=False, **options
            )
            for line in answer:
                yield line.removesuffix(b"\n").decode(errors="replace")


@contextmanager
def _explained(context: str, kind: JobKind | None = None, may_be_gone: bool = False) -> Iterator[None]:
    """Turn an error of the API into a LaunchError, except for a job that `may_be_gone`. `kind`: of a call for a job."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        said = _read_status(error.body)
        about = said.get("details") or {}
        if may_be_gone and error.status == 404 and about.get("name") and about.get("kind") != "namespaces":
            return
        message = _shorten(str(said.get("message") or error.reason))
        texts = {
            401: "the cluster does not accept the kubeconfig's credentials; log in again.",
            403: f"the cluster does not allow it: {message}; ask its administrator for permission, or use another "
            "namespace.",
            409: f"the object exists already: {message}; launch again, or delete the existing object.",
        }
        refused = f"the cluster refused the request ({error.status}): {message}"
        if kind is not None and kind.kind == "TrainJob":
            refused += "; with a Kubeflow Trainer before 2.3 use launch.kubernetes.kind=jobset, which it has too"
        text = texts.get(error.status, refused)
        if kind is not None and error.status == 404 and "message" not in said:
            text = (
                f"the cluster does not have {kind.kind} ({kind.group}/{kind.version}); install {kind.operator}, or use "
                "another launch.kubernetes.kind."
            )
        raise LaunchError(text) from error
    except HTTPError as error:
        reason = _shorten(str(getattr(error, "reason", None) or error))
        raise LaunchError(
            f"the cluster of context {context} does not answer ({reason}); check it with `kubectl get pods`."
        ) from error


def _read_status(body: Any) -> dict[str, Any]:
    """The Status object in the body of an error; empty for an unknown path, which has none."""
    with suppress(TypeError, ValueError):
        if isinstance(status := json.loads(body), dict):
            return status
    return {}


def _shorten(text: str) -> str:
    return shorten(" ".join(text.split()), _LONGEST_MESSAGE)


def _read_pods(pods: Sequence[Mapping[str, Any]], container: str) -> list[PodState]:
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


def _join(*parts: str | None) -> str:
    return ": ".join(" ".join(part.split()) for part in parts if part)


def judge(job: Mapping[str, Any] | None, pods: Sequence[PodState]) -> JobStatus:
    """The status from the job's conditions and its pods. A missing job was deleted, after it could save."""
    running = sum(pod.running for pod in pods)
    if job is None:
        if running:
            return JobStatus("running", f"deleted; {running} of {len(pods)} pods are saving and shutting down")
        return JobStatus("stopped", "no longer in the cluster", STOPPED)
    conditions = (job.get("status") or {}).get("conditions") or []
    now = {condition["type"]: condition for condition in conditions if condition["status"] == "True"}
    if any(name in now for name in _DONE):
        return JobStatus("done", "", DONE)
    if "Failed" in now:
        return _judge_failure(now["Failed"], pods)
    if "Suspended" in now:
        return JobStatus("queued", f"suspended: {_join(now['Suspended'].get('message')) or 'waiting in a queue'}")
    return JobStatus("running" if running else "queued", _describe(running, pods))


def _judge_failure(condition: Mapping[str, Any], pods: Sequence[PodState]) -> JobStatus:
    """The status of a failed job, from its pods' exit codes; at launch.max_hours the operator deletes the pods."""
    detail = _join(condition.get("reason"), condition.get("message"))
    codes = [pod.exit_code for pod in pods if pod.exit_code not in (None, DONE)]
    out_of_time = condition.get("reason") == "DeadlineExceeded" or "specified deadline" in detail
    code = codes[0] if codes else STOPPED if out_of_time else FAILED
    return JobStatus(name_ending(code), detail, code)


def _describe(running: int, pods: Sequence[PodState]) -> str:
    words = f"{running} of {len(pods)} pods running" if pods else "no pods yet"
    troubled = [pod for pod in pods if pod.trouble and not pod.running]
    if troubled:
        words += f"; {troubled[0].name}: {troubled[0].trouble}"
        words += f", and {len(troubled) - 1} more" if len(troubled) > 1 else ""
    return words


class KubernetesLauncher(Launcher):
    """Runs a job as pods of a cluster. Its id is NAMESPACE/NAME."""

    record_form = RecordForm(id=f"{NAME}/{NAME}", place={"kind": "|".join(map(re.escape, KINDS)), "context": r"[^\0]+"})
    keeps_others = True
    way_of_secrets = (
        "put it into a Secret of the cluster, and name the Secret in launch.kubernetes.env_from_secrets or "
        "launch.kubernetes.volumes"
    )

    @override
    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        return "there", f"the image {launch.kubernetes.image}"

    @override
    def check(self, job: JobSpec) -> list[str]:
        return check_job(job)

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """The manifest."""
        return {_MANIFEST: render_manifest(job)}

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """Creates the job first, so that it can own the ConfigMap; its pods wait for the ConfigMap."""
        config_map, body = yaml.safe_load_all(read_text(job.folder / _MANIFEST))
        settings = job.recipe.launch.kubernetes
        cluster = KubernetesCluster(settings.context, KINDS[settings.kind], settings.namespace)
        made = cluster.create_job(body)
        owner = {"apiVersion": body["apiVersion"], "kind": body["kind"], "name": job.name}
        config_map["metadata"]["ownerReferences"] = [{**owner, "uid": made["metadata"]["uid"]}]
        try:
            cluster.create_config_map(config_map)
        except LaunchError:
            cluster.delete_job(job.name)
            raise
        return Submitted(f"{settings.namespace}/{job.name}", {"kind": settings.kind, "context": cluster.context})

    @override
    def status(self, record: JobRecord) -> JobStatus:
        cluster, name = _find(record)
        return judge(cluster.find_job(name), cluster.list_pods(name))

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """The pod of rank 0, then the others, each after its name; `follow`: only the first, each of its starts."""
        cluster, name = _find(record)
        if not follow:
            started = [pod for pod in cluster.list_pods(name) if pod.start is not None]
            if not started:
                raise LaunchError(f"{record.name} has printed nothing yet: {self.status(record).detail}.")
            for pod in started:
                if len(started) > 1:
                    yield f"--- {pod.name}"
                yield from cluster.read_log(pod.name, follow)
            return
        shown: set[tuple[str, int]] = set()
        while True:
            ended = self.status(record).state in FINAL_STATES
            first = next(iter(cluster.list_pods(name)), None)
            if first is not None and first.start is not None and first.start not in shown:
                shown.add(first.start)
                yield from cluster.read_log(first.name, follow)
            elif ended:
                return
            else:
                time.sleep(_LOOK_SECONDS)

    @override
    def cancel(self, record: JobRecord) -> None:
        """Deletes the job; each pod gets SIGTERM, and time to save."""
        cluster, name = _find(record)
        if self.status(record).state in FINAL_STATES or not cluster.delete_job(name):
            kind, namespace = cluster.kind, record.id.partition("/")[0]
            raise LaunchError(
                f"{record.name} has ended already; `kubectl delete {kind.plural}.{kind.group} {name} -n {namespace}` "
                "removes its remains."
            )


def _find(record: JobRecord) -> tuple[KubernetesCluster, str]:
    """Where a job runs, and its name there."""
    namespace, _, name = record.id.partition("/")
    return KubernetesCluster(record.place["context"], KINDS[record.place["kind"]], namespace), name
