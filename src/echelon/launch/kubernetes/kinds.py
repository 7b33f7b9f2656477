"""The job kinds of a cluster: their names in the API, and the names that their operators give."""

from dataclasses import dataclass

from echelon.launch.job import JobSpec

PORT = 29400
"""The rendezvous port of a job's pods. Each pod has its own address, so the port is always free."""


@dataclass(frozen=True)
class JobKind:
    """How one kind is addressed in the API.

    `container` is the container name its operator expects. `pods_by` is the label that selects a job's pods.
    `operator` is what to install if the cluster does not know the kind.
    """

    group: str
    version: str
    kind: str
    plural: str
    container: str
    pods_by: str
    operator: str


KINDS = {
    "pytorchjob": JobKind(
        "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", "pytorch", "training.kubeflow.org/job-name",
        "Kubeflow's training operator (v1)",
    ),
    "trainjob": JobKind(
        "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", "node", "jobset.sigs.k8s.io/jobset-name",
        "Kubeflow Trainer 2.3 or later",
    ),
    "hyperpod": JobKind(
        "sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs", "pytorch-job-container", "HPJob",
        "the SageMaker HyperPod training operator",
    ),
    # The pod with the driver's output is that of the Kubernetes Job that submits it.
    "rayjob": JobKind(
        "ray.io", "v1", "RayJob", "rayjobs", "ray-job-submitter", "batch.kubernetes.io/job-name",
        "KubeRay 1.3 or later",
    ),
}  # fmt: skip


def find_kind(job: JobSpec) -> JobKind:
    """The kind a job is submitted as."""
    return KINDS[job.recipe.launch.kubernetes.kind]


def is_elastic(job: JobSpec) -> bool:
    """Whether the number of pods may change."""
    return job.nodes[0] < job.nodes[1]


def longest_pod_name(job: JobSpec) -> str:
    """The longest name that the operator gives to a pod of the job.

    A PyTorchJob's pods are NAME-master-0 and NAME-worker-0, a TrainJob's NAME-node-0-0 and a suffix of five characters,
    a HyperPodPyTorchJob's NAME-pod-0. KubeRay admits names of RayJobs up to 47 characters.
    """
    last = job.nodes[1] - 1
    kind = job.recipe.launch.kubernetes.kind
    if kind == "trainjob":
        return f"{job.name}-node-0-{last}-xxxxx"
    if kind == "hyperpod":
        return f"{job.name}-pod-{last}"
    if kind == "rayjob":
        return f"{job.name}-xxxxx-head-xxxxx"
    return f"{job.name}-worker-{last}"


def rendezvous_host(job: JobSpec) -> str:
    """The host name under which all pods reach the first pod.

    A PyTorchJob gives each pod a service of the pod's name; one with an elastic policy has no master. The pods of a
    TrainJob are those of a JobSet, which has one service.
    """
    if job.recipe.launch.kubernetes.kind == "trainjob":
        return f"{job.name}-node-0-0.{job.name}"
    return f"{job.name}-worker-0" if is_elastic(job) else f"{job.name}-master-0"
