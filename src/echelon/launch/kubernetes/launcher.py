"""Submit a job's manifest; query, read and cancel the job."""

import re
import time
from collections.abc import Iterator

import yaml
from typing_extensions import override

from echelon.ground.errors import LaunchError
from echelon.ground.stored import read_text
from echelon.launch.job import FINAL_STATES, NAME, JobRecord, JobSpec, JobStatus, Launcher, RecordForm, Submitted
from echelon.launch.kubernetes.checks import check_job
from echelon.launch.kubernetes.cluster import KubernetesCluster
from echelon.launch.kubernetes.kinds import KINDS, JobKind, find_kind
from echelon.launch.kubernetes.manifest import render_manifest
from echelon.launch.kubernetes.pods import PodState, judge, read_pods
from echelon.recipe.launch_sections import LaunchConfig

_MANIFEST = "manifest.yaml"
_LOOK_SECONDS = 2.0


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
        text = read_text(job.folder / _MANIFEST)
        config_map, body = yaml.safe_load_all(text)
        settings = job.recipe.launch.kubernetes
        kind = find_kind(job)
        cluster = KubernetesCluster(settings.context)
        made = cluster.create_job(kind, body)
        owner = {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "name": job.name,
            "uid": made["metadata"]["uid"],
        }
        config_map["metadata"]["ownerReferences"] = [owner]
        try:
            cluster.create_config_map(config_map)
        except LaunchError:
            cluster.delete_job(kind, settings.namespace, job.name)
            raise
        return Submitted(f"{settings.namespace}/{job.name}", {"kind": settings.kind, "context": cluster.context})

    @override
    def status(self, record: JobRecord) -> JobStatus:
        cluster, kind, namespace, name = _find(record)
        return judge(cluster.find_job(kind, namespace, name), _list_pods(cluster, kind, namespace, name))

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """The pod of rank 0, then the others, each after its name; `follow` shows only the first."""
        cluster, kind, namespace, name = _find(record)
        if follow:
            yield from self._follow(record)
            return
        pods = _list_pods(cluster, kind, namespace, name)
        started = [pod for pod in pods if pod.start is not None]
        if not started:
            raise LaunchError(f"{record.name} has printed nothing yet: {self.status(record).detail}.")
        for pod in started:
            if len(started) > 1:
                yield f"--- {pod.name}"
            yield from cluster.read_log(namespace, pod.name, kind.container, False)

    @override
    def cancel(self, record: JobRecord) -> None:
        """Deletes the job; each pod gets SIGTERM, and time to save."""
        cluster, kind, namespace, name = _find(record)
        if self.status(record).state in FINAL_STATES:
            raise LaunchError(
                f"{record.name} has ended already; `kubectl delete {kind.plural}.{kind.group} {name} -n {namespace}` "
                "removes its remains."
            )
        if not cluster.delete_job(kind, namespace, name):
            raise LaunchError(f"{record.name} has ended already.")

    def _follow(self, record: JobRecord) -> Iterator[str]:
        """Yield the first pod's lines, once for every start of its container, until the job ends."""
        cluster, kind, namespace, name = _find(record)
        shown: set[tuple[str, int]] = set()
        while True:
            ended = self.status(record).state in FINAL_STATES
            for pod in _list_pods(cluster, kind, namespace, name)[:1]:
                if pod.start is not None and pod.start not in shown:
                    shown.add(pod.start)
                    yield from cluster.read_log(namespace, pod.name, kind.container, True)
                    break
            else:
                if ended:
                    return
                time.sleep(_LOOK_SECONDS)


def _find(record: JobRecord) -> tuple[KubernetesCluster, JobKind, str, str]:
    namespace, _, name = record.id.partition("/")
    return KubernetesCluster(record.place["context"]), KINDS[record.place["kind"]], namespace, name


def _list_pods(cluster: KubernetesCluster, kind: JobKind, namespace: str, name: str) -> list[PodState]:
    return read_pods(cluster.list_pods(namespace, kind.pods_by, name), kind.container)
