"""Offline checks of a SageMaker job, before anything is uploaded or billed.

Limits: the API reference of CreateTrainingJob, compared with botocore's model of it in the tests.
"""

import re
from collections.abc import Mapping
from typing import Any

from echelon.ground.errors import ConfigError, MissingSettingError
from echelon.ground.extras import EXTRAS
from echelon.planner.hardware.instances import cluster_of
from echelon.planner.hardware.job_machines import JobMachines
from echelon.recipe.document import Recipe
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.names import ENGINES, NATIVE
from echelon.recipe.operation import CheckpointConfig
from echelon.recipe.sagemaker_sections import SageMakerConfig

_KEY = "launch.sagemaker"
_MAX_HOURS = 28 * 24
# SageMaker kills a container 120 s after the request to stop; the margin is for delivery of the signal.
_MAX_NOTICE_SECONDS = 110
_MAX_ENVIRONMENT, _MAX_VARIABLE = 100, 512
_MAX_CHANNELS, _MAX_METRICS, _MAX_REGEX = 20, 40, 500
_MAX_TAGS, _MAX_TAG_KEY, _MAX_TAG_VALUE = 50, 128, 256
_MAX_SUBNETS, _MAX_GROUPS = 16, 5
_MAX_DIRECTORY = 4096
_MAX_WORD, _MAX_ADDRESS, _MAX_IMAGE = 256, 1024, 255


def find_region(settings: SageMakerConfig) -> str:
    """The region of a job: the recipe's, else the AWS configuration's. Raises ConfigError if neither is set."""
    if (region := settings.region) is None:
        try:
            import boto3
        except ImportError:
            region = None
        else:
            region = boto3.Session().region_name
    if region is None:
        raise MissingSettingError(
            f"{_KEY}.region is not set, and AWS has no default region; set it, such as us-east-1.",
            {f"{_KEY}.region": "xx-set-launch-sagemaker-region-0"},
        )
    if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", region):
        raise ConfigError(f"{_KEY}.region={region} is not an AWS region; write it like us-east-1.")
    return region


def check_settings(recipe: Recipe, machines: JobMachines, default_max_hours: float) -> None:
    """Raise ConfigError for the first invalid setting, with its key and a fix."""
    _check_addresses(recipe.launch.sagemaker)
    _check_machines(recipe.launch, machines)
    _check_instance_groups(recipe.launch.sagemaker, machines)
    _check_engine(recipe, machines)
    _check_times(recipe, default_max_hours)
    _check_network(recipe)
    for variable in recipe.launch.sagemaker.secrets.keys() & recipe.launch.env.keys():
        raise ConfigError(f"{variable} is both in launch.env and in {_KEY}.secrets; remove one.")
    _check_file_systems(recipe.launch.sagemaker)
    _check_tracking(recipe)
    _check_files(recipe.checkpoint)


def _check_addresses(settings: SageMakerConfig) -> None:
    """Refuse a missing role, and addresses of AWS in a wrong form."""
    if settings.role is None:
        raise MissingSettingError(
            f"{_KEY}.role is not set; give the ARN of the job's execution role, like "
            "arn:aws:iam::111122223333:role/NAME.",
            {f"{_KEY}.role": f"arn:aws:iam::000000000000:role/SET-{_KEY}.role"},
        )
    for name, form, like in (
        ("role", r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", "arn:aws:iam::111122223333:role/NAME"),
        ("mlflow_arn", r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:mlflow-[a-zA-Z-]*/.*",
         "arn:aws:sagemaker:us-east-1:111122223333:mlflow-tracking-server/NAME"),
        ("training_plan_arn", r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.*",
         "arn:aws:sagemaker:us-east-1:111122223333:training-plan/NAME"),
        ("kms_key", r"[a-zA-Z0-9:/_-]+", "arn:aws:kms:us-east-1:111122223333:key/ID"),
    ):  # fmt: skip
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(form, value):
            raise ConfigError(f"{_KEY}.{name}={value} is not in SageMaker's format; write it like {like}.")


def _check_machines(launch: LaunchConfig, machines: JobMachines) -> None:
    settings, instance = launch.sagemaker, machines.weakest
    fewest, most = launch.node_range
    if fewest != most:
        raise ConfigError(
            f"launch.nodes={launch.nodes}: a SageMaker job has a fixed number of machines; use launch.nodes={most}."
        )
    cluster_of(instance, most, None if launch.nproc_per_node == "auto" else launch.nproc_per_node)
    if launch.accelerator is not None and launch.accelerator.lower() != str(instance.accelerator).lower():
        raise ConfigError(
            f"launch.accelerator={launch.accelerator} contradicts {_KEY}.instance_type={instance.name}, which has "
            f"{instance.accelerator}; remove launch.accelerator."
        )
    if settings.image is None and "V100" in str(instance.accelerator):
        raise ConfigError(
            f"{_KEY}.instance_type={instance.name}: AWS's PyTorch image uses CUDA 13, which does not support V100; "
            f"set {_KEY}.image to an image with CUDA 12, or use a newer type."
        )
    if instance.own_disks and settings.volume_gb != type(settings).model_fields["volume_gb"].default:
        raise ConfigError(
            f"{_KEY}.volume_gb={settings.volume_gb}: {instance.name} has local disks of fixed size and gets no "
            f"volume; remove {_KEY}.volume_gb."
        )
    if settings.spot and settings.keep_alive_seconds:
        raise ConfigError(
            f"{_KEY}.keep_alive_seconds={settings.keep_alive_seconds} keeps machines warm, which spot machines do not "
            f"support; remove it, or {_KEY}.spot."
        )
    if settings.spot and settings.training_plan_arn:
        raise ConfigError(f"{_KEY}.training_plan_arn (reserved capacity) excludes {_KEY}.spot; remove one.")


def _check_instance_groups(settings: SageMakerConfig, machines: JobMachines) -> None:
    if settings.kms_key and len({group.instance.own_disks for group in machines.groups}) > 1:
        raise ConfigError(
            f"{_KEY}.kms_key: some types in {_KEY}.instance_groups have local disks, for which SageMaker refuses a "
            "key, and some have volumes, which would stay without it; use types that are alike in this."
        )


def _check_engine(recipe: Recipe, machines: JobMachines) -> None:
    """Refuse an engine whose package the container would lack, and one that would leave the GPUs idle."""
    row, settings, instance = ENGINES[recipe.engine], recipe.launch.sagemaker, machines.weakest
    if row.package is not None and recipe.engine not in EXTRAS and settings.image is None:
        raise ConfigError(
            f"engine={recipe.engine}: AWS's image does not have the package {row.package}, and pip cannot install it "
            f"when the job starts; set {_KEY}.image to an image that has it (docs/engines.md), or use "
            f"engine={NATIVE} with {row.instead}."
        )
    if recipe.engine == "tensorflow" and instance.gpus:
        raise ConfigError(
            f"engine=tensorflow computes on CPUs, but {_KEY}.instance_type={instance.name} has GPUs, which would be "
            f"paid for and not used; use a type without GPUs, such as ml.m5.4xlarge, or engine={NATIVE} with "
            f"{row.instead}."
        )


def _check_times(recipe: Recipe, default_max_hours: float) -> None:
    launch, spot = recipe.launch, recipe.launch.sagemaker.spot
    hours = launch.max_hours or default_max_hours
    if hours > _MAX_HOURS:
        raise ConfigError(f"launch.max_hours={hours:g}: a SageMaker job runs for at most {_MAX_HOURS} h (28 days).")
    if hours * 3600 < 1:
        raise ConfigError(f"launch.max_hours={hours:g} is less than a second; use a larger value.")
    if spot is not None and spot.max_wait_hours < hours:
        origin = "" if launch.max_hours else ", the default"
        raise ConfigError(
            f"{_KEY}.spot.max_wait_hours={spot.max_wait_hours:g} includes waiting and training, but is less than "
            f"launch.max_hours={hours:g}{origin}; raise it, or lower launch.max_hours."
        )
    if recipe.fault.notice_seconds > _MAX_NOTICE_SECONDS:
        raise ConfigError(
            f"fault.notice_seconds={recipe.fault.notice_seconds:g}: SageMaker kills a container 120 s after the "
            f"request to stop; use {_MAX_NOTICE_SECONDS} or less."
        )


def _check_network(recipe: Recipe) -> None:
    """Refuse half of a VPC, wrong ids, and what training cannot do without a network."""
    settings = recipe.launch.sagemaker
    _check_vpc(settings)
    if settings.network_isolation:
        _check_isolation(recipe)


def _check_vpc(settings: SageMakerConfig) -> None:
    """Refuse half of a VPC, and wrong ids."""
    if bool(settings.subnets) != bool(settings.security_group_ids):
        missing = "security_group_ids" if settings.subnets else "subnets"
        raise MissingSettingError(
            f"{_KEY}.{missing} is missing: a job in a VPC needs subnets and security_group_ids.",
            {f"{_KEY}.{missing}": [f"SET-{missing.replace('_', '-')}"]},
        )
    for name, most in (("subnets", _MAX_SUBNETS), ("security_group_ids", _MAX_GROUPS)):
        if len(getattr(settings, name)) > most:
            raise ConfigError(f"{_KEY}.{name} has {len(getattr(settings, name))} entries; the limit is {most}.")
        for value in getattr(settings, name):
            if not re.fullmatch(r"[-0-9a-zA-Z]{1,32}", value):
                raise ConfigError(f"{_KEY}.{name}: {value!r} is not an AWS id; write it like subnet-0abc or sg-0abc.")


def _check_isolation(recipe: Recipe) -> None:
    settings = recipe.launch.sagemaker
    if settings.secrets:
        raise ConfigError(
            f"{_KEY}.secrets are read over the network, which {_KEY}.network_isolation=true blocks; remove one."
        )
    if settings.image is None and settings.wheels is None:
        raise ConfigError(
            f"{_KEY}.network_isolation=true: the container reaches no package index, and AWS's image lacks packages "
            f"that echelon needs; set {_KEY}.wheels=download, or {_KEY}.image to an image that has them."
        )
    online = [name for name in recipe.track if name != "tensorboard"]
    if online or recipe.checkpoint.remote is not None:
        key = f"track: {online[0]}" if online else f"checkpoint.remote={recipe.checkpoint.remote}"
        raise ConfigError(f"{key} needs the network, which {_KEY}.network_isolation=true blocks; remove one.")


def _check_file_systems(settings: SageMakerConfig) -> None:
    for index, file_system in enumerate(settings.file_systems):
        key = f"{_KEY}.file_systems.{index}"
        if not settings.subnets:
            raise ConfigError(
                f"{key}: a file system is reached in its VPC; set {_KEY}.subnets and {_KEY}.security_group_ids."
            )
        if not re.fullmatch(r"fs-[0-9a-f]{8,18}", file_system.id):
            raise ConfigError(f"{key}.id={file_system.id} is not the id of a file system; write it like fs-0a1b2c3d.")
        if len(file_system.path) > _MAX_DIRECTORY:
            raise ConfigError(f"{key}.path has {len(file_system.path)} characters; the limit is {_MAX_DIRECTORY}.")
        if file_system.type == "FSxLustre" and file_system.path.strip("/") == "":
            raise ConfigError(
                f"{key}.path={file_system.path}: FSx for Lustre needs its mount name, which its console shows; write "
                "it like /MOUNT_NAME or /MOUNT_NAME/text."
            )


def _check_tracking(recipe: Recipe) -> None:
    if "prometheus" in recipe.track:
        raise ConfigError(
            "track: prometheus needs a connection to the process, and nothing outside can connect to a container of "
            "SageMaker; remove it: CloudWatch receives the metrics, and mlflow and wandb work there."
        )
    arn, address = recipe.launch.sagemaker.mlflow_arn, recipe.mlflow.tracking_uri
    if arn is None:
        return
    if "mlflow" not in recipe.track:
        raise ConfigError(f"{_KEY}.mlflow_arn is set, but track does not have mlflow; add mlflow to track.")
    if address not in (None, arn):
        raise ConfigError(f"mlflow.tracking_uri and {_KEY}.mlflow_arn are two different MLflow servers; remove one.")


def _check_files(checkpoint: CheckpointConfig) -> None:
    if (checkpoint.remote or "").startswith("file://"):
        raise ConfigError(
            f"checkpoint.remote={checkpoint.remote} is a folder on this machine; SageMaker copies checkpoints to "
            f"{_KEY}.checkpoint_uri by itself: remove it."
        )


def check_limits(request: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError for the first value of the request that exceeds a limit of the API, with its recipe key."""
    algorithm = request["AlgorithmSpecification"]
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", request["TrainingJobName"]):
        raise ConfigError(
            f"the job name {request['TrainingJobName']} must have 1 to 63 letters, digits and inner dashes; shorten "
            "run.name."
        )
    if len(algorithm["TrainingImage"]) > _MAX_IMAGE:
        raise ConfigError(f"{_KEY}.image has {len(algorithm['TrainingImage'])} characters; the limit is {_MAX_IMAGE}.")
    if re.search(r"\s", algorithm["TrainingImage"]):
        raise ConfigError(f"{_KEY}.image={algorithm['TrainingImage']!r} contains a space; give an ECR image URI.")
    for word in algorithm["ContainerEntrypoint"]:
        if len(word) > _MAX_WORD:
            raise ConfigError(f"launch.python has {len(word)} characters; the limit is {_MAX_WORD}.")
    assert len(algorithm["MetricDefinitions"]) <= _MAX_METRICS
    assert all(len(metric["Regex"]) <= _MAX_REGEX for metric in algorithm["MetricDefinitions"])
    _check_channels(request["InputDataConfig"], recipe.launch)
    _check_environment(request["Environment"])
    _check_tags(recipe.launch.sagemaker.tags)
    experiment = request.get("MlflowConfig", {}).get("MlflowExperimentName", "-")
    if not 1 <= len(experiment) <= _MAX_WORD:
        raise ConfigError(f"mlflow.experiment has {len(experiment)} characters; use 1 to {_MAX_WORD}.")


def _check_channels(channels: list[dict[str, Any]], launch: LaunchConfig) -> None:
    if len(channels) > _MAX_CHANNELS:
        raise ConfigError(
            f"the job has {len(channels)} channels; the limit is {_MAX_CHANNELS}. Combine sources of data.train in one "
            f"folder, or {_KEY}.channels under one prefix."
        )
    if len(launch.sagemaker.bucket or "") > _MAX_ADDRESS // 2:
        raise ConfigError(f"{_KEY}.bucket has more than {_MAX_ADDRESS // 2} characters; shorten it.")


def _check_environment(environment: Mapping[str, str]) -> None:
    if len(environment) > _MAX_ENVIRONMENT:
        raise ConfigError(f"launch.env has {len(environment)} variables; the limit is {_MAX_ENVIRONMENT}.")
    for name, value in environment.items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or len(name) > _MAX_VARIABLE:
            raise ConfigError(f"launch.env: {name!r} is not a valid variable name; use letters, digits and _.")
        if len(value) > _MAX_VARIABLE:
            raise ConfigError(
                f"launch.env.{name} has {len(value)} characters; the limit is {_MAX_VARIABLE}. Put it into a file of a "
                "channel, or set it in launch.setup."
            )


def _check_tags(tags: Mapping[str, str]) -> None:
    """Refuse tags beyond the limits of the API."""
    if len(tags) > _MAX_TAGS:
        raise ConfigError(f"{_KEY}.tags has {len(tags)} entries; the limit is {_MAX_TAGS}.")
    for name, value in tags.items():
        if not 1 <= len(name) <= _MAX_TAG_KEY or len(value) > _MAX_TAG_VALUE or name.lower().startswith("aws:"):
            raise ConfigError(
                f"{_KEY}.tags.{name}: a tag's name must have 1 to {_MAX_TAG_KEY} characters and not start with aws:, "
                f"its value at most {_MAX_TAG_VALUE} characters; change it."
            )
        for text in (name, value):
            if not all(letter.isalnum() or letter.isspace() or letter in "_.:/=+-@" for letter in text):
                raise ConfigError(f"{_KEY}.tags.{name}: use only letters, digits, spaces and _.:/=+-@ in tags.")
