"""`launch`: where a run is started, with a section for each target that has settings."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from echelon.recipe.names import LAUNCHERS, Target
from echelon.recipe.sagemaker_sections import SageMakerConfig
from echelon.recipe.section import Count, CountOrZero, Flag, OpenSection, Positive, PositiveOrZero, Section, rule

Port = Annotated[Count, Field(ge=1024, le=65535)]

_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunConfig(Section):
    """`launch.to: torchrun`: machines reached by ssh, which share the working directory."""

    hosts: tuple[str, ...] = Field((), description="Host names or addresses; the rendezvous is at the first one.")
    port: Port = Field(29400, description="Rendezvous port on the first host.")
    ssh_options: tuple[str, ...] = Field(
        (), description="Additional arguments for `ssh`, one per entry: `[-l, ubuntu, -p, '2222']`."
    )
    interface: str | None = Field(None, description="Network interface. Default: the one that reaches the first host.")
    workdir: str | None = Field(
        None, description="Working directory on the hosts. Default: the same as on this machine."
    )


Options = dict[str, str | int | bool]
"""Options of a command by their long names; `true` is an option without a value, `false` leaves it out."""


class SlurmContainerConfig(Section):
    """A container in which each machine runs its task; the batch script runs outside."""

    runtime: Literal["pyxis", "apptainer"] = Field(
        description="`pyxis`: the srun plugin that starts enroot containers; `apptainer`: `apptainer exec`."
    )
    image: str = Field(
        min_length=1,
        description="Image in the runtime's format, with echelon installed: `nvcr.io#nvidia/pytorch:25.10-py3`, a "
        "`.sqsh` file (pyxis); `docker://...`, a `.sif` file (apptainer).",
    )
    mounts: tuple[str, ...] = Field(
        (),
        description="Folders of the machine in the container, `SOURCE[:TARGET[:FLAGS]]`. The working directory is "
        "always mounted.",
    )
    options: Options = Field(
        default_factory=dict,
        description="Additional options of the runtime by their long names: `{no-container-mount-home: true}` (pyxis), "
        "`{writable-tmpfs: true}` (apptainer, which also gets `nv: true`).",
    )


class SlurmConfig(Section):
    """`launch.to: slurm`: one batch job with one task per machine."""

    gpus_per_node: CountOrZero | None = Field(
        None, description="GPUs requested per machine, 0 for none. Default: nproc_per_node, if that is a number."
    )
    requeue: Flag = Field(True, description="Requeue the job when it is preempted or reaches its time limit.")
    options: Options = Field(
        default_factory=dict,
        description="Options of sbatch by their long names: `{partition: gpu, account: team, mem: 200G, cpus-per-task: "
        "96}`. `mem: 0`: all memory of the machine. `exclusive: true`: all its cores.",
    )
    srun_options: Options = Field(
        default_factory=dict, description="Additional srun options by their long names: `{mpi: pmix}`."
    )
    container: SlurmContainerConfig | None = Field(None, description="Run each task in a container.")


class RayConfig(Section):
    """`launch.to: ray`: a job of Ray Jobs on a running cluster, with one agent on each machine of a placement group."""

    address: str = Field(
        "http://127.0.0.1:8265",
        min_length=1,
        description="The dashboard of the cluster, `http://HOST:8265`; on a machine of the cluster also `auto`.",
    )
    workdir: str | None = Field(
        None, description="Working directory that the machines share. Default: the same as on this machine."
    )
    gpus_per_node: CountOrZero | None = Field(
        None, description="GPUs requested per machine, 0 for none. Default: nproc_per_node, if that is a number."
    )
    resources: dict[str, PositiveOrZero] = Field(
        default_factory=dict,
        description="Resources requested per machine: `{CPU: 96, memory: 1e11, my_rack: 1}`. Default: one core.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="Labels of the machines: `{ray.io/accelerator-type: H100}`."
    )
    wait_seconds: Positive = Field(
        600.0, description="Time limit for Ray to find the machines; then the job fails. Also after a machine is lost."
    )
    interface: str | None = Field(None, description="Network interface. Default: the one that reaches the rendezvous.")
    runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        description="Ray's runtime environment on all machines: `{py_modules: [my_package]}`, `{image_uri: ...}`, "
        "`{pip: [numpy]}`. With `pip` or `uv`, also `[]`, each machine installs echelon too, from a wheel of the job. "
        "Default: that of the cluster.",
    )


class SkyPilotConfig(Section):
    """`launch.to: skypilot`: a managed job on machines that SkyPilot rents, with `launch.accelerator` if it is set."""

    resources: dict[str, Any] = Field(
        default_factory=dict,
        description="SkyPilot's `resources`: `{infra: aws, use_spot: true, image_id: ..., disk_size: 500}`. It also "
        "names `accelerators`, if there are alternatives or launch.accelerator is not set.",
    )
    secrets: tuple[str, ...] = Field(
        (), description="Environment variables of `echelon launch` that SkyPilot passes on as secrets: `[HF_TOKEN]`."
    )
    patch: dict[str, Any] = Field(
        default_factory=dict,
        description="Merged into the task, for fields without a key here: `{workdir: .}`; null removes a field.",
    )


class VolumeConfig(Section):
    """A volume of a pod, mounted at `mount`; it has exactly one of claim, host_path, secret_name and source."""

    mount: str = Field(pattern="^/", description="Path in the container.")
    claim: str | None = Field(None, description="A PersistentVolumeClaim.")
    host_path: str | None = Field(None, pattern="^/", description="A path on the machine.")
    secret_name: str | None = Field(None, description="A Secret.")
    source: dict[str, Any] | None = Field(
        None, description="Any other source, as in a pod: `{nfs: {server: HOST, path: /export}}`, `{emptyDir: {}}`."
    )
    sub_path: str | None = Field(None, description="The folder of the volume that is mounted. Default: all of it.")
    read_only: Flag = Field(False, description="Mount it read-only.")

    @rule
    def _one_source(self) -> None:
        names = ("claim", "host_path", "secret_name", "source")
        taken = [name for name in names if getattr(self, name) is not None]
        if len(taken) != 1:
            raise ValueError(
                f"launch.kubernetes.volumes: the volume at {self.mount} has {' and '.join(taken) or 'no source'}; give "
                "exactly one of claim, host_path, secret_name and source."
            )
        if self.source is not None and len(self.source) != 1:
            raise ValueError(
                f"launch.kubernetes.volumes: the source of the volume at {self.mount} has {len(self.source)} keys; "
                "give exactly one, such as {nfs: {server: HOST, path: /export}}."
            )


_INSTEAD_OF_KINDS = {
    "volcano": "use jobset with launch.kubernetes.pod_patch={spec: {schedulerName: volcano}}",
    "mpijob": "use pytorchjob or jobset: echelon starts its processes itself, without mpirun",
    "rayjob": "use launch.to=ray with launch.ray.address, the dashboard of a cluster that KubeRay keeps",
    **dict.fromkeys(
        ("trainjob-2.0", "trainjob-2.1", "trainjob-2.2"),
        "use trainjob with Kubeflow Trainer 2.3 or later, or jobset, which older ones have too",
    ),
}


class KubernetesConfig(Section):
    """`launch.to: kubernetes`: a job of an operator of the cluster."""

    kind: Literal["pytorchjob", "trainjob", "jobset", "hyperpod"] = Field(
        "pytorchjob",
        description="`pytorchjob`: Kubeflow's training operator (v1); `trainjob`: Kubeflow Trainer 2.3 or later; "
        "`jobset`: JobSet; `hyperpod`: HyperPodPyTorchJob.",
    )
    image: str | None = Field(None, description="Container image with echelon installed.")
    namespace: str = Field("default", description="Namespace of the job.")
    context: str | None = Field(None, description="Context of the kubeconfig. Default: the current one.")
    gpus_per_node: CountOrZero | None = Field(None, description="`nvidia.com/gpu` per pod. Default: nproc_per_node.")
    resources: dict[str, CountOrZero | str] = Field(
        default_factory=dict,
        description="Other resources per pod, both request and limit: `{cpu: 90, memory: 1500Gi, rdma/hca: 8}`; for "
        "MIG `{nvidia.com/mig-3g.40gb: 1}` with `gpus_per_node: 0`. Default of cpu and memory: 90 % of what its GPUs "
        "have, if the nodeSelector of pod_patch names a type of the catalogue.",
    )
    shared_memory: str = Field("16Gi", description="Size of /dev/shm; a container's default is 64 MB.")
    volumes: tuple[VolumeConfig, ...] = Field(
        (), description="Mounted volumes; the run folder and the data must be on one."
    )
    workdir: str | None = Field(None, description="Working directory. Default: the mount point of the first volume.")
    env_from_secrets: tuple[str, ...] = Field(
        (), description="Secrets whose keys become environment variables. Not with trainjob."
    )
    queue: str | None = Field(None, description="Kueue's local queue.")
    patch: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Merged into the job object, for fields without a key here: `{metadata: {labels: {team: a}}}`; "
        "null removes a field.",
    )
    pod_patch: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Merged into the template of all pods: `{spec: {nodeSelector: {...}, securityContext: {fsGroup: "
        "1000}, tolerations: [...]}}`. Entries of containers, volumes and other named lists are merged by name.",
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _kinds_that_are_gone(cls, kind: object) -> object:
        if instead := _INSTEAD_OF_KINDS.get(str(kind)):
            raise ValueError(f"launch.kubernetes.kind={kind} is gone; {instead}.")
        return kind


class LaunchConfig(OpenSection):
    """Where `echelon launch` starts the run, on how many machines, and with which environment."""

    plugins = (LAUNCHERS,)

    to: Target | None = Field(None, description="The target, if `--to` is not given.")
    nodes: Count | str = Field(
        1,
        description="Number of machines; `MIN:MAX`: any number in this range, also changing during the run; `4+1`: one "
        "more waits to take the place of a lost one (torchrun, slurm).",
    )
    nproc_per_node: Count | Literal["auto"] = Field("auto", description="Processes per machine; auto: one per GPU.")
    accelerator: str | None = Field(
        None, description="Accelerator of the machines, such as `H100`; the plan is checked against its memory."
    )
    max_hours: Positive | None = Field(
        None,
        description="Time limit of the job at its target; locally and by ssh the run is then asked to save and stop.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of every process.")
    setup: tuple[str, ...] = Field(
        (),
        description="Bash lines that each machine runs first, such as `module load cuda`; a failing line ends the job.",
    )
    python: str = Field(
        "python3", description="Python interpreter with echelon on the machines. Local: the current one."
    )
    torchrun: TorchrunConfig = Field(TorchrunConfig(), description="For `to: torchrun`.")
    slurm: SlurmConfig = Field(SlurmConfig(), description="For `to: slurm`.")
    ray: RayConfig = Field(RayConfig(), description="For `to: ray`.")
    skypilot: SkyPilotConfig = Field(SkyPilotConfig(), description="For `to: skypilot`.")
    kubernetes: KubernetesConfig = Field(KubernetesConfig(), description="For `to: kubernetes`.")
    sagemaker: SageMakerConfig = Field(SageMakerConfig(), description="For `to: sagemaker`.")

    @field_validator("nodes", mode="before")
    @classmethod
    def _a_number_or_a_range(cls, nodes: object) -> object:
        match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*)|\+[1-9]\d*)?", str(nodes))
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"launch.nodes={nodes} is neither a number of machines, nor MIN:MAX, nor N+SPARES; use 2, 1:4 or 4+1."
            )
        return int(match[0]) if match[0].isdigit() else nodes

    @field_validator("env")
    @classmethod
    def _names_of_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"launch.env: {name!r} is not a valid variable name; use letters, digits and _.")
            if name in _OF_RANKS:
                raise ValueError(f"launch.env: {name} differs between processes and is set by echelon; remove it.")
        return env

    @rule
    def _groups_have_all_machines(self) -> None:
        total = self._num_in_groups
        if total and self.nodes not in (1, total):
            raise ValueError(
                f"launch.nodes={self.nodes} contradicts launch.sagemaker.instance_groups, which have {total} machines; "
                "remove launch.nodes."
            )

    @property
    def _num_in_groups(self) -> int:
        """The number of machines in instance groups; 0 without groups, and at other targets."""
        return sum(group.nodes for group in self.sagemaker.instance_groups) if self.to == "sagemaker" else 0

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest and the most machines, spares included."""
        if self._num_in_groups:
            return self._num_in_groups, self._num_in_groups
        least, _, most = str(self.nodes).partition("+")[0].partition(":")
        return int(least), int(most or least) + self.num_spares

    @property
    def num_spares(self) -> int:
        """The machines that wait until another one is lost."""
        return int(str(self.nodes).partition("+")[2] or 0)

    @property
    def max_training(self) -> int:
        """The most machines that train at the same time."""
        return self.node_range[1] - self.num_spares
