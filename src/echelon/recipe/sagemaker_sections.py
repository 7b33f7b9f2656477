"""`launch.sagemaker`: training jobs of Amazon SageMaker AI."""

import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from echelon.ground.redaction import redact, redact_text
from echelon.recipe.section import Count, CountOrZero, Flag, Positive, Section, rule


class SpotConfig(Section):
    """Managed spot training: cheaper machines that may be interrupted; the job resumes when machines are available."""

    max_wait_hours: Positive = Field(description="Limit of waiting plus training time; at least launch.max_hours.")


class FileSystemConfig(Section):
    """A channel that is a folder of a file system in the job's VPC; it is mounted, not copied."""

    channel: str = Field(description="Name of the channel: the folder /opt/ml/input/data/CHANNEL in the recipe.")
    type: Literal["EFS", "FSxLustre"] = Field(description="The kind of file system.")
    id: str = Field(description="Its id, `fs-...`.")
    path: str = Field(pattern="^/", description="The folder; for FSxLustre below its mount name: `/MOUNT_NAME/text`.")
    writable: Flag = Field(False, description="Mount it for writing too.")


class InstanceGroupConfig(Section):
    """Machines of one type in a job with several types; all machines train."""

    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$", description="Name of the group.")
    instance_type: str = Field(description="Such as `ml.p4d.24xlarge`.")
    nodes: Count = Field(1, description="Number of machines.")


SECRET_SCHEME = "secretsmanager://"
"""The start of a secret's name in a recipe with all defaults: what follows is a name, and not a secret."""


def _refer_to_secret(variable: str, given: str) -> str:
    """The ARN of a secret, or its name after SECRET_SCHEME. Raises ValueError, which shows no value that may be one."""
    key = "launch.sagemaker.secrets"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ValueError(f"{key}: {redact_text(variable)!r} is not the name of a variable; use letters, digits and _.")
    name = given.removeprefix(SECRET_SCHEME)
    arn = r"arn:aws[a-z-]*:(?:secretsmanager:[a-z0-9-]+:\d{12}:secret:|ssm:[a-z0-9-]+:\d{12}:parameter/)[\w/+=.@-]+"
    if not re.fullmatch(rf"(?:{arn}|[A-Za-z0-9/_+=.@-]{{1,512}})(?:#[^#\s]+)?", name):
        raise ValueError(
            f"{key}.{variable} is not the ARN or the name of a secret in AWS Secrets Manager, nor a parameter's ARN; "
            "write it like team/hf or arn:aws:secretsmanager:us-east-1:111122223333:secret:team/hf-AbCdEf, and for "
            "one key of a JSON object add #KEY."
        )
    if redact({"key": name}) != {"key": name}:
        raise ValueError(
            f"{key}.{variable} looks like a secret itself, and a recipe is stored in plain text; store it in AWS "
            "Secrets Manager, and give its ARN or name here."
        )
    return name if name.startswith("arn:") else SECRET_SCHEME + name


class SageMakerConfig(Section):
    """`launch.to: sagemaker`: a training job of Amazon SageMaker AI."""

    role: str | None = Field(None, description="ARN of the role of the job.")
    region: str | None = Field(None, description="Default: the account's configuration.")
    instance_type: str | None = Field(
        None,
        description="Such as `ml.p5.48xlarge`, or one that a file of yours describes (docs/cost.md); `auto`: the type "
        "on which the plan fits and the whole run costs least.",
    )
    instance_groups: tuple[InstanceGroupConfig, ...] = Field(
        (),
        max_length=5,
        description="Several instance types in one job, instead of instance_type and launch.nodes: `[{name: a, "
        "instance_type: ml.g5.12xlarge, nodes: 2}, {name: b, instance_type: ml.g6.12xlarge}]`.",
    )
    image: str | None = Field(None, description="Training image. Default: AWS's own for PyTorch.")
    bucket: str | None = Field(None, description="`s3://bucket/prefix` for all files of the job.")
    channels: dict[str, str] = Field(
        default_factory=dict,
        description="Data channels: `{train: s3://bucket/text}` is /opt/ml/input/data/train in the recipe.",
    )
    file_systems: tuple[FileSystemConfig, ...] = Field(
        (), description="Channels from EFS or FSx for Lustre; they require subnets."
    )
    input_mode: Literal["File", "FastFile"] = Field(
        "File", description="Copy the channels before the start (File), or stream them (FastFile)."
    )
    volume_gb: Count = Field(100, description="Volume size per machine in GB; only for types without local disks.")
    spot: SpotConfig | None = Field(None, description="Use spot machines. Default: on-demand machines.")
    keep_alive_seconds: CountOrZero = Field(
        0, le=21600, description="Keep the machines warm for this time after the job."
    )
    checkpoint_uri: str | None = Field(None, description="S3 address of the checkpoints. Default: below bucket.")
    subnets: tuple[str, ...] = Field((), description="Subnets of your VPC; requires security_group_ids.")
    security_group_ids: tuple[str, ...] = Field((), description="Security groups of your VPC; requires subnets.")
    network_isolation: Flag = Field(False, description="No network access except between the machines.")
    kms_key: str | None = Field(None, description="KMS key for uploads, volumes and output.")
    tags: dict[str, str] = Field(default_factory=dict, description="Of the job.")
    secrets: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of training from AWS Secrets Manager: `{HF_TOKEN: <ARN>}`, or a name, and "
        "`<ARN>#KEY` for a secret that is a JSON object; or the ARN of a parameter of Systems Manager.",
    )
    wheels: str | None = Field(
        None,
        description="For containers that reach no package index. `download`: pip collects the packages when the job is "
        "launched, and they are uploaded with it; else a folder of wheels, or its `s3://` address.",
    )
    mlflow_arn: str | None = Field(None, description="SageMaker MLflow app or tracking server.")
    training_plan_arn: str | None = Field(None, description="ARN of reserved capacity.")
    patch: dict[str, Any] = Field(
        default_factory=dict,
        description="Merged into the CreateTrainingJob request, for members without a key here: `{RetryStrategy: "
        "{MaximumRetryAttempts: 2}, EnableInterContainerTrafficEncryption: true}`; null removes a member.",
    )
    distribution: dict[str, Any] = Field(
        default_factory=lambda: {"torch_distributed": {"enabled": True}},
        description="`distribution` dictionary of the SDK: torch_distributed, pytorchddp, smdistributed, mpi.",
    )

    @rule
    def _groups_instead_of_a_type(self) -> None:
        names = [group.name for group in self.instance_groups]
        if names and self.instance_type is not None:
            raise ValueError(
                f"launch.sagemaker.instance_type={self.instance_type} and launch.sagemaker.instance_groups are both "
                "set; remove one."
            )
        if len(set(names)) < len(names):
            raise ValueError(
                f"launch.sagemaker.instance_groups: two groups have the same name among {', '.join(names)}; rename one."
            )

    @field_validator("secrets")
    @classmethod
    def _referred(cls, secrets: dict[str, str]) -> dict[str, str]:
        return {variable: _refer_to_secret(variable, given) for variable, given in secrets.items()}

    @field_validator("bucket", "checkpoint_uri")
    @classmethod
    def _in_s3(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", address):
            shown = re.sub(r"(?<=://)[^/@]+(?=@)", "***", address)
            raise ValueError(
                f"launch.sagemaker.{info.field_name}={shown} is not an address in S3; write it like s3://bucket/prefix."
            )
        return address.rstrip("/") if address else address
