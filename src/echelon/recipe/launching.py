"""Where a run is started: `launch`, with a section for each target that has settings of its own."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from echelon.recipe.section import Count, CountOrZero, Flag, Positive, Section

Target = Literal["local", "torchrun", "slurm", "kubernetes", "sagemaker"]

Port = Annotated[Count, Field(ge=1024, le=65535)]

_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunConfig(Section):
    """`launch.to: torchrun`: machines reached by ssh, which share the working directory."""

    hosts: tuple[str, ...] = Field((), description="Names or addresses, the first one keeps the store all meet in.")
    port: Port = Field(29400, description="Where the first host's agent listens.")
    user: str | None = Field(None, description="Who to be on the hosts. Default: ssh's own choice.")
    ssh_options: tuple[str, ...] = Field((), description="Further words for `ssh`, such as `-p 2222`, one a word.")
    interface: str | None = Field(None, description="Network interface to talk over. Default: the one that reaches it.")
    workdir: str | None = Field(None, description="Folder on the hosts. Default: the same as here.")


class SlurmConfig(Section):
    """`launch.to: slurm`: one batch job, one task a machine."""

    partition: str | None = Field(None, description="Default: the cluster's.")
    account: str | None = Field(None, description="Who pays.")
    qos: str | None = Field(None, description="Quality of service.")
    constraint: str | None = Field(None, description="Features that a machine must have.")
    reservation: str | None = Field(None, description="A reservation to run in.")
    gpus_per_node: CountOrZero | None = Field(
        None, description="GPUs asked for on each machine, 0 for none. Default: nproc_per_node, if that is a number."
    )
    cpus_per_task: Count | None = Field(None, description="Cores asked for on each machine.")
    memory: str | CountOrZero | None = Field(
        None, description="Memory of each machine, such as `200G`; 0 asks for all of it."
    )
    exclusive: Flag = Field(False, description="Share the machines with nobody.")
    requeue: Flag = Field(True, description="Go back into the queue when preempted or out of time.")
    options: dict[str, str | int | bool] = Field(
        default_factory=dict, description="Further options of sbatch by their long names: `{mail-type: END}`."
    )


class VolumeConfig(Section):
    """A volume of a pod: exactly one of `claim`, `host_path` and `secret_name` says what is mounted at `mount`."""

    mount: str = Field(pattern="^/", description="Path in the container.")
    claim: str | None = Field(None, description="A PersistentVolumeClaim.")
    host_path: str | None = Field(None, pattern="^/", description="A path of the machine.")
    secret_name: str | None = Field(None, description="A Secret.")
    read_only: Flag = Field(False, description="Mount it read-only.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("claim", "host_path", "secret_name") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"launch.kubernetes.volumes: the volume at {self.mount} has {' and '.join(given) or 'no source'}; give "
                "exactly one of claim, host_path and secret_name."
            )
        return self


class KubernetesConfig(Section):
    """`launch.to: kubernetes`: a training job of the Kubeflow operators, or of SageMaker HyperPod's."""

    kind: Literal["pytorchjob", "trainjob", "hyperpod"] = Field(
        "pytorchjob",
        description="`pytorchjob`: Kubeflow's training operator (v1); `trainjob`: Kubeflow Trainer (v2); `hyperpod`: "
        "HyperPodPyTorchJob.",
    )
    image: str | None = Field(None, description="Container image with echelon in it.")
    namespace: str = Field("default", description="Where the job is made.")
    context: str | None = Field(None, description="Of the kubeconfig. Default: the current one.")
    gpus_per_node: CountOrZero | None = Field(None, description="`nvidia.com/gpu` of a pod. Default: nproc_per_node.")
    efa_per_node: CountOrZero = Field(0, description="`vpc.amazonaws.com/efa` of a pod.")
    cpu: str | None = Field(None, description="Cores of a pod, such as `8`; asked for, and the limit.")
    memory: str | None = Field(None, description="Memory of a pod, such as `200Gi`.")
    shared_memory: str = Field("16Gi", description="Size of /dev/shm, which a container otherwise has 64 MB of.")
    volumes: tuple[VolumeConfig, ...] = Field(
        (), description="What is mounted; the run folder and the data must lie on one."
    )
    workdir: str | None = Field(None, description="Working directory. Default: where the first volume is mounted.")
    service_account: str | None = Field(None, description="Of the pods.")
    image_pull_secrets: tuple[str, ...] = Field((), description="Names of Secrets.")
    env_from_secrets: tuple[str, ...] = Field((), description="Secrets whose keys become variables. Not in a trainjob.")
    node_selector: dict[str, str] = Field(
        default_factory=dict,
        description="Labels a machine must have. With `sagemaker.amazonaws.com/node-health-status`, HyperPod replaces "
        "broken machines under a pytorchjob.",
    )
    tolerations: tuple[dict[str, Any], ...] = Field((), description="As in a pod.")
    queue: str | None = Field(None, description="Kueue's local queue.")
    runtime: str = Field("torch-distributed", description="The ClusterTrainingRuntime of a trainjob.")


class SpotConfig(Section):
    """Managed spot training: cheaper machines that may be taken away; training goes on when there are others."""

    max_wait_hours: Positive = Field(description="Waiting and training together; at least launch.max_hours.")


class SageMakerConfig(Section):
    """`launch.to: sagemaker`: a training job of Amazon SageMaker AI."""

    role: str | None = Field(None, description="ARN of the role the job runs as.")
    region: str | None = Field(None, description="Default: the account's configuration.")
    instance_type: str | None = Field(
        None, description="Such as `ml.p5.48xlarge`; `auto`: the cheapest of the fewest that fit."
    )
    image: str | None = Field(None, description="Training image. Default: AWS's own for PyTorch.")
    bucket: str | None = Field(None, description="`s3://bucket/prefix` that all the job's files go below.")
    channels: dict[str, str] = Field(
        default_factory=dict,
        description="Data by channel: `{train: s3://bucket/text}`, seen by the recipe as /opt/ml/input/data/train.",
    )
    input_mode: Literal["File", "FastFile"] = Field("File", description="Copy the channels first, or stream them.")
    volume_gb: Count = Field(100, description="Disk of each machine, GB; only of types without disks of their own.")
    spot: SpotConfig | None = Field(None, description="Use spot machines. Default: on-demand ones.")
    keep_alive_seconds: CountOrZero = Field(0, le=21600, description="Keep the machines warm so long after the job.")
    max_attempts: Count = Field(1, le=30, description="Starts of the job when SageMaker itself fails.")
    checkpoint_uri: str | None = Field(None, description="Where checkpoints are kept. Default: below bucket.")
    subnets: tuple[str, ...] = Field((), description="Of your VPC; with security_group_ids.")
    security_group_ids: tuple[str, ...] = Field((), description="Of your VPC; with subnets.")
    network_isolation: Flag = Field(False, description="No network but that between the machines.")
    encrypt_traffic: Flag = Field(False, description="Encrypt what the machines send each other; slower.")
    kms_key: str | None = Field(None, description="Key for uploads, volume and output.")
    tags: dict[str, str] = Field(default_factory=dict, description="Of the job.")
    mlflow_arn: str | None = Field(None, description="SageMaker's MLflow app or tracking server to track in.")
    training_plan_arn: str | None = Field(None, description="Reserved capacity to use.")
    remote_debug: Flag = Field(False, description="Allow a shell in the container through SSM.")
    sdk: Literal["boto3", "model_trainer"] = Field("boto3", description="What submits: boto3, or ModelTrainer.")
    distribution: dict[str, Any] = Field(
        default_factory=lambda: {"torch_distributed": {"enabled": True}},
        description="As the SDK names it: torch_distributed, pytorchddp, smdistributed, mpi.",
    )

    @field_validator("bucket", "checkpoint_uri")
    @classmethod
    def _in_s3(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", address):
            shown = re.sub(r"(?<=://)[^/@]+(?=@)", "***", address)
            raise ValueError(
                f"launch.sagemaker.{info.field_name}={shown} is not an address in S3; write it like s3://bucket/prefix."
            )
        return address.rstrip("/") if address else address


class LaunchConfig(Section):
    """Where the run is started by `echelon launch`, on how many machines, and with what around it."""

    to: Target | None = Field(None, description="The target, where `--to` does not say it.")
    nodes: Count | str = Field(
        1, description="Machines; `MIN:MAX`: as many as there are, and the run goes on when some leave or come."
    )
    nproc_per_node: Count | Literal["auto"] = Field("auto", description="Processes of a machine; auto: one per GPU.")
    accelerator: str | None = Field(
        None,
        description="What the machines compute with, such as `H100`: the plan for nproc_per_node of them is checked "
        "against their memory.",
    )
    max_hours: Positive | None = Field(
        None, description="The target's time limit for the job; here and by ssh it is asked to save and end then."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Variables of every process.")
    setup: tuple[str, ...] = Field(
        (),
        description="Lines of bash each machine runs first, such as `module load cuda`; one that fails ends the job.",
    )
    python: str = Field("python3", description="The Python on the machines that has echelon. Local: this one.")
    torchrun: TorchrunConfig = Field(TorchrunConfig(), description="For `to: torchrun`.")
    slurm: SlurmConfig = Field(SlurmConfig(), description="For `to: slurm`.")
    kubernetes: KubernetesConfig = Field(KubernetesConfig(), description="For `to: kubernetes`.")
    sagemaker: SageMakerConfig = Field(SageMakerConfig(), description="For `to: sagemaker`.")

    @field_validator("nodes", mode="before")
    @classmethod
    def _a_number_or_a_range(cls, nodes: object) -> object:
        match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", str(nodes))
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"launch.nodes={nodes} is neither a number of machines nor MIN:MAX; use 2, or 1:4.")
        return nodes if match[2] else int(match[1])

    @field_validator("env")
    @classmethod
    def _names_of_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"launch.env: {name!r} cannot be the name of a variable; use letters, digits and _.")
            if name in _OF_RANKS:
                raise ValueError(f"launch.env: {name} is another one in each process, and set for it; leave it out.")
        return env

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest and the most machines."""
        first, _, last = str(self.nodes).partition(":")
        return int(first), int(last or first)
