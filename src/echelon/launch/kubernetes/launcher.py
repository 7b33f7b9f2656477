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
from echelon.launch.kubernetes.cluster import KubernetesCluster, judge
from echelon.launch.kubernetes.kinds import KINDS
from echelon.launch.kubernetes.manifest import render_manifest
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
