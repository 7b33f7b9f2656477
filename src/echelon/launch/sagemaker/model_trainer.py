"""`launch.sagemaker.sdk: model_trainer`: the same job through the ModelTrainer of SageMaker's Python SDK, version 3.

ModelTrainer builds its own request from the same values and adds the defaults in the organisation's SDK configuration.
echelon's fields win: ModelTrainer has none for the entry point, MLflow or the metrics' time series, and it would choose
the job's name. The SDK: https://github.com/aws/sagemaker-python-sdk, `sagemaker.train`.
"""

from collections.abc import Mapping
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.extras import missing_package


def merge_defaults(session: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Add the fields that ModelTrainer fills in to the request.

    `session` is a boto3 session. Raises ConfigError if the SDK is missing or refuses the values.
    """
    try:
        from sagemaker.core.helper.session_helper import Session
    except ImportError:
        otherwise = "or use launch.sagemaker.sdk=boto3, which sends the same request without the SDK's defaults"
        raise missing_package(
            "launch.sagemaker.sdk=model_trainer", "sagemaker-train", "sagemaker-sdk", otherwise
        ) from None
    bucket = request["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://").split("/")[0]
    # Without a bucket the session would create one.
    trainer = _build_trainer(Session(boto_session=session, default_bucket=bucket), request)
    try:
        added = trainer._create_training_job_args(boto3=True)
    except ValueError as error:
        raise ConfigError(f"ModelTrainer refused the job: {' '.join(str(error).split())}") from error
    return _merge({key: value for key, value in added.items() if value not in (None, {}, [])}, request)


def _build_trainer(session: Any, request: Mapping[str, Any]) -> Any:
    """Build a ModelTrainer from the fields that it supports."""
    from sagemaker.core.shapes import (
        Channel,
        CheckpointConfig,
        MetricDefinition,
        OutputDataConfig,
        RemoteDebugConfig,
        RetryStrategy,
        StoppingCondition,
        Tag,
        TensorBoardOutputConfig,
    )
    from sagemaker.core.training.configs import Compute, Networking
    from sagemaker.train import ModelTrainer

    algorithm, resources, vpc = (
        request["AlgorithmSpecification"],
        request["ResourceConfig"],
        request.get("VpcConfig", {}),
    )
    trainer = ModelTrainer(
        sagemaker_session=session,
        role=request["RoleArn"],
        base_job_name=request["TrainingJobName"],
        training_image=algorithm["TrainingImage"],
        training_input_mode=algorithm["TrainingInputMode"],
        compute=Compute(
            enable_managed_spot_training=request["EnableManagedSpotTraining"],
            **{_FIELDS[name]: value for name, value in resources.items() if name in _FIELDS},
        ),
        networking=Networking(
            subnets=vpc.get("Subnets"),
            security_group_ids=vpc.get("SecurityGroupIds"),
            enable_network_isolation=request["EnableNetworkIsolation"],
            enable_inter_container_traffic_encryption=request["EnableInterContainerTrafficEncryption"],
        ),
        stopping_condition=StoppingCondition(**_snake(request["StoppingCondition"])),
        output_data_config=OutputDataConfig(**_snake(request["OutputDataConfig"])),
        checkpoint_config=CheckpointConfig(**_snake(request["CheckpointConfig"])),
        input_data_config=[Channel(**_snake(channel)) for channel in request["InputDataConfig"]],
        environment=dict(request["Environment"]),
        tags=[Tag(**_snake(tag)) for tag in request.get("Tags", [])] or None,
    ).with_metric_definitions([MetricDefinition(**_snake(metric)) for metric in algorithm["MetricDefinitions"]])
    for name, shape, add in (
        ("TensorBoardOutputConfig", TensorBoardOutputConfig, trainer.with_tensorboard_output_config),
        ("RetryStrategy", RetryStrategy, trainer.with_retry_strategy),
        ("RemoteDebugConfig", RemoteDebugConfig, trainer.with_remote_debug_config),
    ):
        if name in request:
            add(shape(**_snake(request[name])))
    return trainer


_FIELDS = {
    "InstanceType": "instance_type",
    "InstanceCount": "instance_count",
    "VolumeSizeInGB": "volume_size_in_gb",
    "VolumeKmsKeyId": "volume_kms_key_id",
    "KeepAlivePeriodInSeconds": "keep_alive_period_in_seconds",
    "TrainingPlanArn": "training_plan_arn",
}


def _snake(value: Any) -> Any:
    """Convert API names to the SDK's spelling, `S3DataSource` to `s3_data_source`."""
    from sagemaker.core.utils.code_injection.codec import pascal_to_snake

    if isinstance(value, Mapping):
        return {pascal_to_snake(name): _snake(part) for name, part in value.items()}
    return [_snake(part) for part in value] if isinstance(value, list) else value


def _merge(defaults: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for name, value in request.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merge(merged[name], value) if both else value
    return merged
