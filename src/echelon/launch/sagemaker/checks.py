"""What SageMaker would refuse, or take money for in vain, found before anything is uploaded.

Limits: the API's reference of CreateTrainingJob, compared with botocore's model of it in the tests.
"""

import re
from collections.abc import Mapping
from typing import Any

from echelon.errors import ConfigError
from echelon.hardware.instances import Instance, cluster_of
from echelon.recipe import CheckpointConfig, LaunchConfig, Recipe
from echelon.recipe.launching import SageMakerConfig

_KEY = "launch.sagemaker"
_MAX_HOURS = 28 * 24
# SageMaker kills a container 120 s after it asked it to stop; some of that is for the way there.
_MAX_NOTICE_SECONDS = 110
_MAX_ENVIRONMENT, _MAX_VARIABLE = 100, 512
_MAX_CHANNELS, _MAX_METRICS, _MAX_REGEX = 20, 40, 500
_MAX_TAGS, _MAX_TAG_KEY, _MAX_TAG_VALUE = 50, 128, 256
_MAX_SUBNETS, _MAX_GROUPS = 16, 5
_MAX_WORD, _MAX_ADDRESS, _MAX_IMAGE = 256, 1024, 255


def find_region(settings: SageMakerConfig) -> str:
    """The region of a job: the recipe's, else the account's. Raises ConfigError where neither says one."""
    region = settings.region
    if region is None:
        try:
            import boto3
        except ImportError:
            region = None
        else:
            region = boto3.Session().region_name
    if region is None:
        raise ConfigError(f"{_KEY}.region is not set, and neither is the account's; write it like us-east-1.")
    if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", region):
        raise ConfigError(f"{_KEY}.region={region} is not an AWS region; write it like us-east-1.")
    return region


def check_settings(recipe: Recipe, instance: Instance, default_max_hours: float) -> None:
    """Raise ConfigError for the first setting that cannot be, naming its key and what would do."""
    _check_addresses(recipe.launch.sagemaker)
    _check_machines(recipe.launch, instance)
    _check_times(recipe, default_max_hours)
    _check_network(recipe)
    _check_tracking(recipe)
    _check_files(recipe.checkpoint)


def _check_addresses(settings: SageMakerConfig) -> None:
    if settings.role is None:
        raise ConfigError(
            f"{_KEY}.role is not set; give the ARN of the role the job runs as, like "
            "arn:aws:iam::111122223333:role/NAME."
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
            raise ConfigError(f"{_KEY}.{name}={value} has not the form SageMaker takes; write it like {like}.")


def _check_machines(launch: LaunchConfig, instance: Instance) -> None:
    launch, settings = launch, launch.sagemaker
    fewest, most = launch.node_range
    if fewest != most:
        raise ConfigError(
            f"launch.nodes={launch.nodes}: SageMaker gives a job a fixed number of machines; use launch.nodes={most}."
        )
    cluster_of(instance, most, None if launch.nproc_per_node == "auto" else launch.nproc_per_node)
    if launch.accelerator is not None and launch.accelerator.lower() != str(instance.accelerator).lower():
        raise ConfigError(
            f"launch.accelerator={launch.accelerator} and {_KEY}.instance_type={instance.name}, which has "
            f"{instance.accelerator}, differ; remove launch.accelerator."
        )
    if settings.image is None and str(instance.accelerator).startswith("V100"):
        raise ConfigError(
            f"{_KEY}.instance_type={instance.name}: AWS's image for PyTorch is built on CUDA 13, which has no V100; "
            f"give {_KEY}.image with CUDA 12, or use a newer type."
        )
    if instance.own_disks and settings.volume_gb != type(settings).model_fields["volume_gb"].default:
        raise ConfigError(
            f"{_KEY}.volume_gb={settings.volume_gb}: {instance.name} has disks of its own, whose size is fixed, and "
            f"gets no volume; remove {_KEY}.volume_gb."
        )
    if settings.spot and settings.keep_alive_seconds:
        raise ConfigError(
            f"{_KEY}.keep_alive_seconds={settings.keep_alive_seconds} keeps machines warm, and spot ones cannot be "
            f"kept; remove it, or {_KEY}.spot."
        )
    if settings.spot and settings.training_plan_arn:
        raise ConfigError(f"{_KEY}.training_plan_arn is reserved capacity, and {_KEY}.spot is spare; remove one.")


def _check_times(recipe: Recipe, default_max_hours: float) -> None:
    launch, spot = recipe.launch, recipe.launch.sagemaker.spot
    hours = launch.max_hours or default_max_hours
    if hours > _MAX_HOURS:
        raise ConfigError(f"launch.max_hours={hours:g}: a job of SageMaker takes at most {_MAX_HOURS} h (28 days).")
    if hours * 3600 < 1:
        raise ConfigError(f"launch.max_hours={hours:g} is less than a second; give the job hours.")
    if spot is not None and spot.max_wait_hours < hours:
        given = "" if launch.max_hours else ", the default"
        raise ConfigError(
            f"{_KEY}.spot.max_wait_hours={spot.max_wait_hours:g} holds waiting and training together, and is less than "
            f"launch.max_hours={hours:g}{given}; raise it, or lower launch.max_hours."
        )
    if recipe.fault.notice_seconds > _MAX_NOTICE_SECONDS:
        raise ConfigError(
            f"fault.notice_seconds={recipe.fault.notice_seconds:g}: SageMaker kills a container 120 s after it asked "
            f"it to stop; use {_MAX_NOTICE_SECONDS} or less."
        )


def _check_network(recipe: Recipe) -> None:
    settings = recipe.launch.sagemaker
    if bool(settings.subnets) != bool(settings.security_group_ids):
        missing = "security_group_ids" if settings.subnets else "subnets"
        raise ConfigError(f"{_KEY}.{missing} is missing: a job in a VPC needs subnets and security_group_ids.")
    for name, most in (("subnets", _MAX_SUBNETS), ("security_group_ids", _MAX_GROUPS)):
        if len(getattr(settings, name)) > most:
            raise ConfigError(f"{_KEY}.{name} has {len(getattr(settings, name))} entries; SageMaker takes {most}.")
        for value in getattr(settings, name):
            if not re.fullmatch(r"[-0-9a-zA-Z]{1,32}", value):
                raise ConfigError(f"{_KEY}.{name}: {value!r} is no id of AWS; write it like subnet-0abc or sg-0abc.")
    if not settings.network_isolation:
        return
    if settings.image is None:
        raise ConfigError(
            f"{_KEY}.network_isolation=true keeps the container from installing what echelon needs, and AWS's image "
            f"has not all of it; set {_KEY}.image to one that has."
        )
    online = [name for name in recipe.track if name != "tensorboard"]
    if online or recipe.checkpoint.remote is not None:
        key = f"track: {online[0]}" if online else f"checkpoint.remote={recipe.checkpoint.remote}"
        raise ConfigError(f"{key} needs a network, and {_KEY}.network_isolation=true allows none; remove one.")


def _check_tracking(recipe: Recipe) -> None:
    arn, address = recipe.launch.sagemaker.mlflow_arn, recipe.mlflow.tracking_uri
    if arn is None:
        return
    if "mlflow" not in recipe.track:
        raise ConfigError(f"{_KEY}.mlflow_arn is given, and nothing is tracked there; add mlflow to track.")
    if address not in (None, arn):
        raise ConfigError(f"mlflow.tracking_uri and {_KEY}.mlflow_arn both say where MLflow is; remove one.")


def _check_files(checkpoint: CheckpointConfig) -> None:
    if (checkpoint.remote or "").startswith("file://"):
        raise ConfigError(
            f"checkpoint.remote={checkpoint.remote} is a folder of this machine; SageMaker keeps checkpoints at "
            f"{_KEY}.checkpoint_uri by itself: remove it."
        )


def check_limits(request: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError for the first value of the finished request that the API does not take, by its recipe key."""
    algorithm = request["AlgorithmSpecification"]
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", request["TrainingJobName"]):
        raise ConfigError(
            f"the job's name {request['TrainingJobName']} must be 1 to 63 letters, digits and dashes, with none at its "
            "ends; shorten run.name."
        )
    if len(algorithm["TrainingImage"]) > _MAX_IMAGE:
        raise ConfigError(f"{_KEY}.image has {len(algorithm['TrainingImage'])} characters; the API takes {_MAX_IMAGE}.")
    if re.search(r"\s", algorithm["TrainingImage"]):
        raise ConfigError(f"{_KEY}.image={algorithm['TrainingImage']!r} has a space in it; give an address of ECR.")
    for word in algorithm["ContainerEntrypoint"]:
        if len(word) > _MAX_WORD:
            raise ConfigError(f"launch.python has {len(word)} characters; the API takes {_MAX_WORD}.")
    assert len(algorithm["MetricDefinitions"]) <= _MAX_METRICS
    assert all(len(each["Regex"]) <= _MAX_REGEX for each in algorithm["MetricDefinitions"])
    _check_channels(request["InputDataConfig"], recipe.launch)
    _check_environment(request["Environment"])
    _check_tags(recipe.launch.sagemaker.tags)
    experiment = request.get("MlflowConfig", {}).get("MlflowExperimentName", "-")
    if not 1 <= len(experiment) <= _MAX_WORD:
        raise ConfigError(f"mlflow.experiment has {len(experiment)} characters; the API takes 1 to {_MAX_WORD}.")


def _check_channels(channels: list[dict[str, Any]], launch: LaunchConfig) -> None:
    if len(channels) > _MAX_CHANNELS:
        raise ConfigError(
            f"the job has {len(channels)} channels, and SageMaker takes {_MAX_CHANNELS}: put several of data.train "
            f"into one folder, or several of {_KEY}.channels below one prefix."
        )
    if len(launch.sagemaker.bucket or "") > _MAX_ADDRESS // 2:
        raise ConfigError(f"{_KEY}.bucket is too long: what goes below it must stay under {_MAX_ADDRESS} characters.")


def _check_environment(environment: Mapping[str, str]) -> None:
    if len(environment) > _MAX_ENVIRONMENT:
        raise ConfigError(f"launch.env has {len(environment)} variables; SageMaker takes {_MAX_ENVIRONMENT}.")
    for name, value in environment.items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or len(name) > _MAX_VARIABLE:
            raise ConfigError(f"launch.env: {name!r} cannot be the name of a variable; use letters, digits and _.")
        if len(value) > _MAX_VARIABLE:
            raise ConfigError(
                f"launch.env.{name} has {len(value)} characters, and SageMaker takes {_MAX_VARIABLE}; put it into a "
                "file of a channel, or set it in launch.setup."
            )


def _check_tags(tags: Mapping[str, str]) -> None:
    if len(tags) > _MAX_TAGS:
        raise ConfigError(f"{_KEY}.tags has {len(tags)} entries; SageMaker takes {_MAX_TAGS}.")
    for name, value in tags.items():
        if not 1 <= len(name) <= _MAX_TAG_KEY or len(value) > _MAX_TAG_VALUE or name.lower().startswith("aws:"):
            raise ConfigError(
                f"{_KEY}.tags.{name}: a tag's name has 1 to {_MAX_TAG_KEY} characters and does not begin with aws:, "
                f"its value at most {_MAX_TAG_VALUE}; change it."
            )
        for text in (name, value):
            if not all(each.isalnum() or each.isspace() or each in "_.:/=+-@" for each in text):
                raise ConfigError(f"{_KEY}.tags.{name}: tags have letters, digits, spaces and _.:/=+-@; change it.")
