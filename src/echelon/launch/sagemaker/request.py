"""Build the CreateTrainingJob request of a job, as plain data, with AWS's PyTorch image of the region.

Fields: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.launch.job import JobSpec
from echelon.launch.sagemaker.checks import check_limits, check_settings, find_region
from echelon.launch.sagemaker.distribution import apply_distribution
from echelon.launch.sagemaker.request_patch import apply_patch, check_registry
from echelon.launch.sagemaker.staging import CHECKPOINT_DIR, ENTRY, START, Channel, Staging, run_dir, stage_job
from echelon.launch.shell import needs_shell
from echelon.planner.hardware.gpu_check import check_image_devices
from echelon.planner.hardware.instances import INSTANCES, efa_environment
from echelon.planner.hardware.job_machines import JobMachines, find_machines
from echelon.recipe.document import Recipe
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.sagemaker_sections import FileSystemConfig
from echelon.recipe.yaml_text import read_table

REGION = r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}"
"""The pattern of an AWS region's name."""

DEFAULT_MAX_HOURS = 24.0
"""The time limit of a job without `launch.max_hours`. As in the API; the SDK's default is one hour."""

TENSORBOARD_DIR = "/opt/ml/output/tensorboard"
"""The container's copy of the run's event files, which SageMaker uploads to S3."""

_NUMBER = "(-?[0-9]+(?:[.][0-9]+)?(?:e[+-]?[0-9]+)?)"
_STEP = "step +[0-9]+/[0-9]+ .*"
_EVALUATION = "eval at step [0-9]+: .*"

# Regular expressions for the lines of run/journal/journal.py. An unknown value is a dash there and gives no point.
METRICS: tuple[tuple[str, str], ...] = (
    ("train:step", "step +([0-9]+)/[0-9]+ +loss "),
    ("train:loss", f"{_STEP} loss {_NUMBER}"),
    ("train:grad_norm", f"{_STEP} grad_norm {_NUMBER}"),
    ("train:learning_rate", f"{_STEP} lr {_NUMBER}"),
    ("train:tokens_per_second", f"{_STEP} tok/s {_NUMBER}"),
    ("train:mfu_percent", f"{_STEP} mfu {_NUMBER}%"),
    ("train:memory_gib", f"{_STEP} peak_mem {_NUMBER} GiB"),
    ("train:data_wait_percent", f"{_STEP} wait {_NUMBER}%"),
    ("train:cost_usd", f"{_STEP} cost (?:at most )?[$]{_NUMBER}"),
    ("eval:loss", f"{_EVALUATION}loss {_NUMBER}"),
    ("eval:perplexity", f"{_EVALUATION}perplexity {_NUMBER}"),
)


@dataclass(frozen=True)
class Submission:
    """A complete submission: the request, the uploads before it, region and machines, and lines for the user."""

    request: Mapping[str, Any]
    staging: Staging
    region: str
    machines: JobMachines
    lines: tuple[str, ...]

    def render_request(self) -> str:
        """The request as JSON."""
        return json.dumps(self.request, indent=2) + "\n"


def build_submission(job: JobSpec) -> Submission:
    """Build the submission of a job. Raises ConfigError with the key of a setting that cannot work."""
    recipe, settings = job.recipe, job.recipe.launch.sagemaker
    region = find_region(settings)
    machines = find_machines(recipe.launch)
    instance = machines.weakest
    custom = [group.instance.name for group in machines.groups if group.instance.name not in INSTANCES]
    if custom and settings.instance_groups:
        raise ConfigError(
            f"launch.sagemaker.instance_groups: {custom[0]} is described by a file that the job does not have; use "
            "types of the catalogue, or one type in launch.sagemaker.instance_type."
        )
    image = settings.image or find_image(region, instance.gpus > 0)
    check_image(image)
    check_image_devices("launch.sagemaker.image", image, instance.name, instance.gpus, recipe.train.allow_cpu)
    distribution = apply_distribution(recipe)
    check_settings(distribution.recipe, machines, DEFAULT_MAX_HOURS)
    staging = stage_job(job, distribution.recipe)
    request = {
        "TrainingJobName": job.name,
        "AlgorithmSpecification": _algorithm(staging.recipe, image),
        "RoleArn": settings.role,
        "InputDataConfig": [_channel(channel) for channel in staging.channels],
        "OutputDataConfig": {
            "S3OutputPath": f"{settings.bucket}/output",
            "CompressionType": "NONE",
            **({"KmsKeyId": settings.kms_key} if settings.kms_key else {}),
        },
        "ResourceConfig": _resources(recipe.launch, machines),
        "StoppingCondition": _stopping(recipe.launch),
        "CheckpointConfig": {"S3Uri": find_checkpoint_uri(recipe), "LocalPath": str(CHECKPOINT_DIR)},
        "Environment": _environment(recipe.launch, machines, distribution.env),
        "EnableManagedSpotTraining": settings.spot is not None,
        "EnableNetworkIsolation": settings.network_isolation,
        "EnableInterContainerTrafficEncryption": False,
        **_optional_fields(recipe),
    }
    check_limits(request, recipe)
    check_registry(settings)
    request = apply_patch(request, settings)
    lines = (*distribution.lines, *_describe(recipe, machines, image, staging))
    return Submission(request, staging, region, machines, lines)


def find_trained_recipe(recipe: Recipe) -> Recipe:
    """The recipe with the plan of `launch.sagemaker.distribution` applied. Raises ConfigError with the key."""
    return apply_distribution(recipe).recipe


def find_checkpoint_uri(recipe: Recipe) -> str:
    """The S3 address of the container's checkpoint folder, which contains the run folder.

    It is the same for every job of the run, so that the next job resumes.
    """
    settings = recipe.launch.sagemaker
    return settings.checkpoint_uri or f"{settings.bucket}/checkpoints/{recipe.run.name}"


def find_run_uri(recipe: Recipe) -> str:
    """The S3 address of the run folder, whose files are copied there during training."""
    return f"{find_checkpoint_uri(recipe)}/{recipe.run.name}"


def _algorithm(recipe: Recipe, image: str) -> dict[str, Any]:
    """The image and its entry point, which is echelon's: the stock one's shell does not forward signals."""
    launch = recipe.launch
    entry = ["bash", START] if needs_shell(launch) else [launch.python, ENTRY]
    return {
        "TrainingImage": image,
        "TrainingInputMode": launch.sagemaker.input_mode,
        "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in METRICS],
        "EnableSageMakerMetricsTimeSeries": True,
        "ContainerEntrypoint": entry,
    }


def _channel(channel: Channel) -> dict[str, Any]:
    source: dict[str, Any]
    if isinstance(channel.source, FileSystemConfig):
        file_system = {
            "FileSystemId": channel.source.id,
            "FileSystemType": channel.source.type,
            "DirectoryPath": channel.source.path,
            "FileSystemAccessMode": "rw" if channel.source.writable else "ro",
        }
        source = {"FileSystemDataSource": file_system}
    else:
        in_s3 = {"S3DataType": "S3Prefix", "S3Uri": channel.source, "S3DataDistributionType": "FullyReplicated"}
        source = {"S3DataSource": in_s3}
    return {"ChannelName": channel.name, "DataSource": source, "InputMode": channel.mode}


def _resources(launch: LaunchConfig, machines: JobMachines) -> dict[str, Any]:
    settings = launch.sagemaker
    resources: dict[str, Any]
    if settings.instance_groups:
        groups = [
            {"InstanceGroupName": group.name, "InstanceType": group.instance.name, "InstanceCount": group.count}
            for group in machines.groups
        ]
        resources = {"InstanceGroups": groups}
    else:
        resources = {"InstanceType": machines.weakest.name, "InstanceCount": machines.count}
    resources["VolumeSizeInGB"] = settings.volume_gb
    # The API refuses a key for instance disks, which are always encrypted.
    if settings.kms_key and not machines.weakest.own_disks:
        resources["VolumeKmsKeyId"] = settings.kms_key
    if settings.keep_alive_seconds:
        resources["KeepAlivePeriodInSeconds"] = settings.keep_alive_seconds
    if settings.training_plan_arn:
        resources["TrainingPlanArn"] = settings.training_plan_arn
    return resources


def _stopping(launch: LaunchConfig) -> dict[str, int]:
    stopping = {"MaxRuntimeInSeconds": round((launch.max_hours or DEFAULT_MAX_HOURS) * 3600)}
    if launch.sagemaker.spot is not None:
        stopping["MaxWaitTimeInSeconds"] = round(launch.sagemaker.spot.max_wait_hours * 3600)
    return stopping


def _environment(launch: LaunchConfig, machines: JobMachines, chosen: Mapping[str, str]) -> dict[str, str]:
    """The container's variables; the recipe's win. EFA's are set only for several machines."""
    efa = efa_environment(machines.weakest) if machines.count > 1 else {}
    return {**efa, **chosen, **launch.env}


def _optional_fields(recipe: Recipe) -> dict[str, Any]:
    settings = recipe.launch.sagemaker
    fields: dict[str, Any] = {}
    if "tensorboard" in recipe.track:
        fields["TensorBoardOutputConfig"] = {
            "S3OutputPath": f"{settings.bucket}/tensorboard/{recipe.run.name}",
            "LocalPath": TENSORBOARD_DIR,
        }
    if settings.subnets:
        fields["VpcConfig"] = {
            "SecurityGroupIds": list(settings.security_group_ids),
            "Subnets": list(settings.subnets),
        }
    if settings.tags:
        fields["Tags"] = [{"Key": key, "Value": value} for key, value in settings.tags.items()]
    if isinstance(profiler := settings.patch.get("ProfilerConfig"), dict) and not profiler.get("DisableProfiler"):
        fields["ProfilerConfig"] = {"S3OutputPath": f"{settings.bucket}/profiler/{recipe.run.name}"}
    if settings.mlflow_arn:
        fields["MlflowConfig"] = {
            "MlflowResourceArn": settings.mlflow_arn,
            "MlflowExperimentName": recipe.mlflow.experiment,
            "MlflowRunName": recipe.run.name,
        }
    return fields


def _describe(recipe: Recipe, machines: JobMachines, image: str, staging: Staging) -> list[str]:
    launch, settings = recipe.launch, recipe.launch.sagemaker
    where = "spot" if settings.spot else "on demand"
    lines = [f"{machines.describe()} {where}, image {image}"]
    if len({group.instance.name for group in machines.groups}) > 1:
        lines.append("instance groups: all machines get equal shares of a batch, so the slowest type sets the pace")
    if launch.max_hours is None:
        lines.append(f"launch.max_hours is not set: the job ends after {DEFAULT_MAX_HOURS:g} h")
    lines.append(
        f"uploads {len(staging.uploads)} files to {settings.bucket}; checkpoints: {find_checkpoint_uri(recipe)}"
    )
    if settings.subnets and machines.count > 1 and machines.weakest.efa_interfaces:
        lines.append("EFA: launch.sagemaker.security_group_ids must allow all traffic to and from themselves")
    if settings.secrets:
        lines.append(
            f"secrets: the container reads {', '.join(settings.secrets)} from AWS Secrets Manager; "
            "launch.sagemaker.role needs secretsmanager:GetSecretValue"
        )
    if settings.subnets and not settings.network_isolation:
        lines.extend(_describe_internet(staging.recipe))
    if recipe.run.dir != Path("runs") / recipe.run.name:
        lines.append(f"run.dir={recipe.run.dir} is for this machine; in the container it is {run_dir(recipe)}")
    if (prepared := recipe.data.prepared_dir) is not None and staging.recipe.data.prepared_dir is None:
        lines.append(
            f"data.prepared_dir={prepared} is for this machine; the container prepares the data. To send it prepared, "
            "name the folder that `echelon data --prepare` prints"
        )
    elif prepared is not None:
        lines.append(f"data.prepared_dir={prepared}: the job brings its prepared data, and no text")
    return lines


def _describe_internet(recipe: Recipe) -> list[str]:
    """At most one line: what a job in a VPC needs the internet for, and how it does without.

    `recipe` is the container's, in which only names on the hub are no paths.
    """
    needs = []
    if recipe.launch.sagemaker.wheels is None:
        needs.append("pip installs what the image lacks (or set launch.sagemaker.wheels=download)")
    named = [("model.checkpoint", recipe.model.checkpoint)]
    if recipe.tokenizer != "bytes":
        named.append(("tokenizer", recipe.tokenizer if isinstance(recipe.tokenizer, str) else None))
    for kind, sources in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        named += [(f"data.{kind}.{i}.path", source.path) for i, source in enumerate(sources) if source.format == "hub"]
    needs += [
        f"{key}={name} is on the hub (or give a folder or an s3:// address)"
        for key, name in named
        if name is not None and not name.startswith("/")
    ]
    if not needs:
        return []
    return [f"VPC: launch.sagemaker.subnets need a NAT gateway, because {', and '.join(needs)}"]


# PyTorch 2.13.0, Python 3.12, CUDA 13.3, NCCL 2.30.7, EFA 1.49: AWS Deep Learning Containers, changelog of 2026-07-20.
_GPU_TAG = "2.13-cu133-amzn2023-sagemaker"
_CPU_TAG = "2.13-cpu-amzn2023-sagemaker"

_ACCOUNT = "763104351884"
_ACCOUNTS: Mapping[str, str] = read_table(Path(__file__).with_name("image_accounts.yaml"))


def find_image(region: str, has_gpus: bool) -> str:
    """The URI of AWS's PyTorch image in a region."""
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    registry = f"{_ACCOUNTS.get(region, _ACCOUNT)}.dkr.ecr.{region}.{domain}"
    return f"{registry}/pytorch:{_GPU_TAG if has_gpus else _CPU_TAG}"


# As in pyproject.toml.
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


def check_image(image: str) -> None:
    """Raise ConfigError for an AWS image whose tag has a PyTorch or Python version too old for echelon.

    Other images are checked when the container starts.
    """
    match = re.search(r"/(?:huggingface-)?(?:pytorch|smdistributed-modelparallel)[\w-]*:v?(\d+)\.(\d+)(.*)", image)
    if match is None:
        return
    python = re.search(r"-py(\d)(\d+)\b", match[3])
    for name, version, oldest in (
        ("PyTorch", (int(match[1]), int(match[2])), OLDEST_TORCH),
        ("Python", (int(python[1]), int(python[2])) if python else OLDEST_PYTHON, OLDEST_PYTHON),
    ):
        if version < oldest:
            raise ConfigError(
                f"launch.sagemaker.image={image} has {name} {version[0]}.{version[1]}, but echelon needs {oldest[0]}."
                f"{oldest[1]} or later; use a newer image, or remove launch.sagemaker.image to get {_GPU_TAG}."
            )
