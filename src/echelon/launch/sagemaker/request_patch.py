"""`launch.sagemaker.patch`, merged into the request for members that have no recipe key; and private registries.

Members: botocore's model of CreateTrainingJob, compared in the tests.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError, MissingSettingError
from echelon.launch.patch import merge_patch
from echelon.launch.sagemaker.staging import CODE_CHANNEL
from echelon.recipe.sagemaker_sections import SageMakerConfig
from echelon.recipe.yaml_text import read_table

_KEY = "launch.sagemaker"
PATCH = f"{_KEY}.patch"

TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("request.yaml"))
"""What is known of requests, and of the distributions of SageMaker's SDK."""

MEMBERS: tuple[str, ...] = tuple(TABLE["members"].split())
"""The members of a CreateTrainingJob request."""

OWNED: Mapping[str, str] = TABLE["owned"]
"""Members that a recipe key sets, with the key."""

_IMPOSSIBLE: Mapping[str, str] = TABLE["impossible"]
# Of Amazon ECR, in all partitions; SageMaker pulls from every other registry through the VPC of the job.
_ECR = re.compile(r"\d{12}\.dkr[.-]ecr(-fips)?\.[a-z0-9-]+\.([a-z0-9-]+\.)*[a-z]+/.+")


def apply_patch(request: Mapping[str, Any], settings: SageMakerConfig) -> dict[str, Any]:
    """The request with `launch.sagemaker.patch` merged into it. Raises ConfigError for a member that it cannot set."""
    for name in settings.patch:
        if name not in MEMBERS:
            near = difflib.get_close_matches(str(name), MEMBERS, n=1)
            raise ConfigError(
                f"{PATCH}.{name} is not a member of a CreateTrainingJob request; "
                + (f"did you mean {near[0]}?" if near else f"the members are {', '.join(MEMBERS)}.")
            )
    for path, value in _list_places(settings.patch):
        if path in OWNED:
            raise ConfigError(f"{PATCH}.{path}: echelon sets it from {OWNED[path]}; set that key instead.")
        if path in _IMPOSSIBLE:
            raise ConfigError(f"{PATCH}.{path}: {_IMPOSSIBLE[path]}; remove it.")
        below = [*OWNED, *_IMPOSSIBLE]
        if value is None and (inside := next((key for key in below if key.startswith(f"{path}.")), None)):
            raise ConfigError(f"{PATCH}.{path}: null would also remove {inside}, which the job needs; remove it.")
    _check_channels(settings.patch)
    merged: dict[str, Any] = merge_patch(request, settings.patch, PATCH)
    if settings.patch:
        _check_model(merged)
    return merged


def check_registry(settings: SageMakerConfig) -> None:
    """Refuse an image outside Amazon ECR that SageMaker would not be told how to pull."""
    image = settings.image
    if image is None or _ECR.fullmatch(image):
        return
    algorithm = settings.patch.get("AlgorithmSpecification")
    access = algorithm.get("TrainingImageConfig") if isinstance(algorithm, Mapping) else None
    if not isinstance(access, Mapping) or access.get("TrainingRepositoryAccessMode") != "Vpc":
        pull = {"AlgorithmSpecification": {"TrainingImageConfig": {"TrainingRepositoryAccessMode": "Vpc"}}}
        raise MissingSettingError(
            f"{_KEY}.image={image} is not in Amazon ECR, so SageMaker pulls it through the VPC of the job, which the "
            f"request must say; set {PATCH}={{AlgorithmSpecification: {{TrainingImageConfig: "
            "{TrainingRepositoryAccessMode: Vpc}}}, with TrainingRepositoryAuthConfig if the registry asks for a "
            f"password (docs/sagemaker-settings.md), and {_KEY}.subnets and {_KEY}.security_group_ids; or push the "
            "image to ECR.",
            {PATCH: merge_patch(settings.patch, pull, PATCH)},
        )
    if not settings.subnets:
        raise MissingSettingError(
            f"{_KEY}.image={image} is not in Amazon ECR, so SageMaker pulls it through the VPC of the job; set "
            f"{_KEY}.subnets and {_KEY}.security_group_ids to those that reach the registry.",
            {f"{_KEY}.subnets": ["SET-subnets"], f"{_KEY}.security_group_ids": ["SET-security-group-ids"]},
        )


def _list_places(patch: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The members that the patch names, and theirs; deeper ones belong to their parents."""
    for name, value in patch.items():
        yield name, value
        if isinstance(value, Mapping):
            for inner, part in value.items():
                yield f"{name}.{inner}", part


def _check_channels(patch: Mapping[str, Any]) -> None:
    """Refuse a patch that would take a channel from the job, or change the one with echelon itself."""
    if "InputDataConfig" not in patch:
        return
    key, channels = f"{PATCH}.InputDataConfig", patch["InputDataConfig"]
    if not isinstance(channels, list):
        raise ConfigError(f"{key}: give a list of channels, each with its ChannelName; the job's own are kept.")
    for channel in channels:
        name = channel.get("ChannelName") if isinstance(channel, Mapping) else None
        if name == CODE_CHANNEL:
            raise ConfigError(f"{key}: the channel {name} holds the files of echelon; remove it from the patch.")
        if isinstance(channel, Mapping) and "$patch" in channel:
            raise ConfigError(f"{key}: the recipe reads the channel {name}; remove it from the patch, or from data.")


def _check_model(request: Mapping[str, Any]) -> None:
    """Refuse members that boto3 would refuse when the job is submitted; checks nothing where boto3 is not installed."""
    try:
        import botocore.session
        from botocore.validate import ParamValidator
    except ImportError:
        return
    model = botocore.session.get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob")
    report = ParamValidator().validate(request, model.input_shape)
    if report.has_errors():
        raise ConfigError(
            f"{PATCH}: the request is not valid: {' '.join(report.generate_report().split())}; change it."
        )
