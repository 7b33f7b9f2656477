"""The job kinds of a cluster: their names in the API, and the names that their operators give."""

from dataclasses import dataclass

from echelon.launch.job import JobSpec

PORT = 29400
"""The rendezvous port of a job's pods. Each pod has its own address, so the port is always free."""


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
