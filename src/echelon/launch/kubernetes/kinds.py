"""The job kinds of a cluster: their names in the API, and the names that their operators give."""

from dataclasses import dataclass, replace

from echelon.launch.job import JobSpec

PORT = 29400
"""The rendezvous port of a job's pods. Each pod has its own address, so the port is always free."""


@dataclass(frozen=True)
class JobKind:
    """How one kind is addressed in the API, and the names that its operator gives.

    `operator` is what to install if the cluster does not know the kind. `pods_by` is the label that selects a job's
    pods. `container` is the container whose output is the job's, `worker` the one that trains, by default the same.
    `port` is its port, with the name that the operator expects. `pod` and `host` are the longest name of a pod, and the
    name under which all pods reach the first one; they have the fields `name` of the job and `last`, the number of its
    last pod. `is_elastic`: whether the number of pods may change. `lacks`: keys of `launch.kubernetes` for which it has
    no field.
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
    port: tuple[str, int] | None = ("rendezvous", PORT)
    worker: str | None = None
    is_elastic: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def trainer(self) -> str:
        """The name of the container that trains."""
        return self.worker or self.container


_JOBSET_POD, _JOBSET_HOST = "{name}-node-0-{last}-xxxxx", "{name}-node-0-0.{name}"
# The pods of a TrainJob are those of a JobSet, which has one service for all of them.
_TRAINJOB = JobKind(
    "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", "node", "jobset.sigs.k8s.io/jobset-name",
    "Kubeflow Trainer", _JOBSET_POD, _JOBSET_HOST,
    lacks=("priority_class", "scheduler", "host_network", "image_pull_policy", "ttl_seconds"),
)  # fmt: skip
# Those of Kubeflow Trainer before 2.2, and before 2.1.
_LACKS_2_1 = (*_TRAINJOB.lacks, "security_context", "container_security_context")
_LACKS_2_0 = (*_LACKS_2_1, "affinity", "image_pull_secrets", "labels", "annotations")
KINDS = {
    "pytorchjob": JobKind(
        "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", "pytorch", "training.kubeflow.org/job-name",
        "Kubeflow's training operator (v1)", "{name}-worker-{last}", "{name}-master-0", ("pytorchjob-port", PORT),
        is_elastic=True,
    ),
    "trainjob": _TRAINJOB,
    "trainjob-2.2": _TRAINJOB,
    "trainjob-2.1": replace(_TRAINJOB, lacks=_LACKS_2_1),
    "trainjob-2.0": replace(_TRAINJOB, lacks=_LACKS_2_0),
    "jobset": JobKind(
        "jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "node", "jobset.sigs.k8s.io/jobset-name",
        "JobSet 0.8 or later", _JOBSET_POD, _JOBSET_HOST,
    ),
    "volcano": JobKind(
        "batch.volcano.sh", "v1alpha1", "Job", "jobs", "node", "volcano.sh/job-name",
        "Volcano 1.9 or later", "{name}-node-{last}", "{name}-node-0.{name}",
    ),
    "mpijob": JobKind(
        "kubeflow.org", "v2beta1", "MPIJob", "mpijobs", "mpi", "training.kubeflow.org/job-name",
        "Kubeflow's MPI operator 0.6 or later", "{name}-launcher-xxxxx", "{name}-worker-0.{name}", None,
    ),
    # Its operator talks to its agent at the port.
    "hyperpod": JobKind(
        "sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs", "pytorch-job-container", "HPJob",
        "the SageMaker HyperPod training operator", "{name}-pod-{last}", "", ("agent", 8080), is_elastic=True,
    ),
    # The pod with the driver's output is that of the Kubernetes Job that submits it.
    "rayjob": JobKind(
        "ray.io", "v1", "RayJob", "rayjobs", "ray-job-submitter", "batch.kubernetes.io/job-name",
        "KubeRay 1.3 or later", "{name}-xxxxx-head-xxxxx", "", None, "ray-worker", is_elastic=True,
    ),
}  # fmt: skip


def find_kind(job: JobSpec) -> JobKind:
    """The kind a job is submitted as."""
    return KINDS[job.recipe.launch.kubernetes.kind]


def is_elastic(job: JobSpec) -> bool:
    """Whether the number of pods may change."""
    return job.nodes[0] < job.nodes[1]


def longest_pod_name(job: JobSpec) -> str:
    """The longest name that the operator gives to a pod of the job. KubeRay admits RayJobs of up to 47 characters."""
    return find_kind(job).pod.format(name=job.name, last=job.nodes[1] - 1)


def rendezvous_host(job: JobSpec) -> str:
    """The host name under which all pods reach the first pod. An elastic PyTorchJob has workers only."""
    host = find_kind(job).host.format(name=job.name)
    return host.replace("-master-", "-worker-") if is_elastic(job) else host
