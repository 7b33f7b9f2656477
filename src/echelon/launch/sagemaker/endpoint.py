"""`echelon launch RUN --to sagemaker-endpoint`: serve a run's model at an endpoint of SageMaker, with vLLM.

Three requests: CreateModel, CreateEndpointConfig, CreateEndpoint. The image is AWS's vLLM server, which takes the model
from /opt/ml/model and each variable SM_VLLM_X as its argument --x.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from echelon.ground.errors import ConfigError, MissingSettingError, PlanError
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import read_json
from echelon.launch.job import NAME, JobRecord, JobSpec, JobStatus, Launcher, RecordForm, Submitted
from echelon.launch.sagemaker.checks import check_addresses, check_tags, check_vpc, find_region
from echelon.launch.sagemaker.request import REGION, find_registry
from echelon.launch.sagemaker.staging import Upload, job_prefix
from echelon.planner.hardware.instances import Instance, find_instance
from echelon.planner.shape import build_shape
from echelon.recipe import Recipe
from echelon.run.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from echelon.launch.sagemaker.service import Service

_KEY = "launch.sagemaker.endpoint"
# vLLM 0.27.1, CUDA 13.0: AWS Deep Learning Containers, docs/src/data/vllm/0.27.1-gpu-sagemaker.yml.
_IMAGE = "vllm:0.27.1-gpu-py312-cu130-ubuntu22.04-sagemaker"
# Its driver, 580, is new enough for CUDA 13; that of SageMaker's default is not.
_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
_VARIANT = "AllTraffic"
# Objectives whose models score a text, and write none.
_SCORING = ("reward", "classification")
# The share of the GPUs' memory that vLLM uses by default, for weights and the cache of keys and values.
_USED = 0.9
_BYTES_PER_WEIGHT = 2
# Limits of the API for a download, and for the start of the server; a download from S3 is at least this fast.
_LEAST_SECONDS, _MOST_SECONDS = 900, 3600
_BYTES_PER_SECOND = 100e6


@dataclass(frozen=True)
class Deployment:
    """The three requests by the names of their operations, the place of the model in S3, and lines for the user."""

    requests: Mapping[str, Mapping[str, Any]]
    region: str
    address: str
    dtype: str
    lines: tuple[str, ...]


class EndpointLauncher(Launcher):
    """Serves the model of a run: `run.dir` of the job's recipe is the run folder."""

    record_form = RecordForm(id=NAME, place={"region": REGION})

    @override
    def check(self, job: JobSpec) -> list[str]:
        return list(build_deployment(job).lines)

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """Each request as JSON."""
        requests = build_deployment(job).requests
        return {f"{name}.json": json.dumps(request, indent=2) + "\n" for name, request in requests.items()}

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """Export the newest checkpoint, an adapter merged; upload it; send the requests. The id is the name."""
        from echelon.learn.checkpoint.export import export_run

        deployment = build_deployment(job)
        service = _find_service(deployment.region)
        folder = job.workdir / job.folder / "model"
        export_run(job.workdir / job.recipe.run.dir, folder, deployment.dtype)
        uploads = [Upload(f"{deployment.address}{path.name}", path, path.name) for path in sorted(folder.iterdir())]
        service.upload(uploads, job.recipe.launch.sagemaker.kms_key)
        shutil.rmtree(folder)
        service.deploy(deployment.requests)
        return Submitted(job.name, {"region": deployment.region})

    @override
    def status(self, record: JobRecord) -> JobStatus:
        return _find_service(record.place["region"]).describe_endpoint(record.id)

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """Lines of the server from CloudWatch."""
        return _find_service(record.place["region"]).read_endpoint_log(record.id, follow)

    @override
    def cancel(self, record: JobRecord) -> None:
        """Delete the endpoint, which ends its costs, and the other two objects; the model stays in S3."""
        _find_service(record.place["region"]).delete_endpoint(record.id)


def _find_service(region: str) -> "Service":
    from echelon.launch.sagemaker.service import Service

    return Service(region)


def build_deployment(job: JobSpec) -> Deployment:
    """Build the requests of a job. Raises ConfigError or PlanError for what is missing, or cannot be served."""
    recipe, settings = job.recipe, job.recipe.launch.sagemaker
    config = _read_config(recipe, job.workdir / recipe.run.dir)
    check_addresses(settings)
    check_vpc(settings)
    check_tags(settings.tags)
    region = find_region(settings)
    instance = _find_machine(recipe)
    address = f"{job_prefix(job)}/model/"
    nbytes = build_shape(config, has_adapter=False).num_parameters * _BYTES_PER_WEIGHT
    split = _divide(config, instance)
    _check_memory(nbytes, split, instance)
    tags = {"Tags": [{"Key": key, "Value": value} for key, value in settings.tags.items()]} if settings.tags else {}
    seconds = round(min(max(nbytes / _BYTES_PER_SECOND, _LEAST_SECONDS), _MOST_SECONDS))
    image = settings.endpoint.image or f"{find_registry(region)}/{_IMAGE}"
    variant = {
        "VariantName": _VARIANT,
        "ModelName": job.name,
        "InstanceType": instance.name,
        "InitialInstanceCount": settings.endpoint.nodes,
        "ModelDataDownloadTimeoutInSeconds": seconds,
        "ContainerStartupHealthCheckTimeoutInSeconds": seconds,
        "InferenceAmiVersion": _AMI,
    }
    has_key = settings.kms_key is not None and not instance.own_disks  # as for training jobs
    requests = {
        "create_model": _build_model(job, image, address, split) | tags,
        "create_endpoint_config": {
            "EndpointConfigName": job.name,
            "ProductionVariants": [variant],
            **({"KmsKeyId": settings.kms_key} if has_key else {}),
            **tags,
        },
        "create_endpoint": {"EndpointName": job.name, "EndpointConfigName": job.name, **tags},
    }
    assert instance.device is not None
    dtype = "fp16" if instance.device.bf16_flops is None else "bf16"
    lines = (
        f"model: {render_bytes(nbytes)} in {dtype}, uploaded to {address}",
        f"{settings.endpoint.nodes} x {instance.name}, {split} of {instance.gpus} GPU(s) used on each, image {image}",
        *_describe(job, instance),
    )
    return Deployment(requests, region, address, dtype, lines)


def _read_config(recipe: Recipe, run: Path) -> dict[str, Any]:
    """The config of the run's model. Raises ConfigError without a checkpoint, or for a model that writes no text."""
    from echelon.learn.checkpoint.folder import find_checkpoint

    find_checkpoint(run)
    if recipe.objective.name in _SCORING:
        raise ConfigError(
            f"{run} has objective.name={recipe.objective.name}: its model scores texts and writes none, and the "
            "endpoint generates text; export it with `echelon export`, and serve it with code of your own."
        )
    config: dict[str, Any] = read_json(RunFolder(run).model_dir / "config.json")
    return config


def _find_machine(recipe: Recipe) -> Instance:
    settings = recipe.launch.sagemaker
    if (name := settings.endpoint.instance_type) is None:
        raise MissingSettingError(
            f"{_KEY}.instance_type is not set; give --instance, such as --instance ml.g6.xlarge.",
            {f"{_KEY}.instance_type": "ml.g6.xlarge"},
        )
    instance = find_instance(name, f"{_KEY}.instance_type", settings.region)
    if settings.endpoint.image is None and "V100" in str(instance.accelerator):
        raise ConfigError(
            f"{_KEY}.instance_type={name}: AWS's vLLM image uses CUDA 13, which does not support V100; use a newer "
            f"type, or set {_KEY}.image."
        )
    if not instance.gpus:
        raise ConfigError(
            f"{_KEY}.instance_type={name} has no NVIDIA GPU, which the server needs; use a type such as ml.g6.xlarge."
        )
    return instance


def _divide(config: Mapping[str, Any], instance: Instance) -> int:
    """Over how many GPUs each layer is divided: the most of one machine that divide the attention heads equally."""
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    return max(count for count in range(1, instance.gpus + 1) if instance.gpus % count == heads % count == 0)


def _check_memory(nbytes: int, split: int, instance: Instance) -> None:
    assert instance.device is not None
    there = instance.device.memory_bytes
    if there is not None and nbytes > _USED * split * there:
        raise PlanError(
            f"{_KEY}.instance_type={instance.name}: the weights need {render_bytes(nbytes)} in 16 bits, and {split} "
            f"GPU(s) of {render_bytes(there)} leave {render_bytes(round(_USED * split * there))} for weights and "
            "requests; use a type with more memory."
        )


def _build_model(job: JobSpec, image: str, address: str, split: int) -> dict[str, Any]:
    settings = job.recipe.launch.sagemaker
    environment = {
        "HF_HUB_OFFLINE": "1",
        "SM_VLLM_SERVED_MODEL_NAME": job.recipe.run.name,
        "SM_VLLM_TENSOR_PARALLEL_SIZE": str(split),
        **settings.endpoint.env,
    }
    model: dict[str, Any] = {
        "ModelName": job.name,
        "ExecutionRoleArn": settings.role,
        "PrimaryContainer": {
            "Image": image,
            "ModelDataSource": {
                "S3DataSource": {"S3Uri": address, "S3DataType": "S3Prefix", "CompressionType": "None"}
            },
            "Environment": environment,
        },
        "EnableNetworkIsolation": settings.network_isolation,
    }
    if settings.subnets:
        model["VpcConfig"] = {
            "SecurityGroupIds": list(settings.security_group_ids),
            "Subnets": list(settings.subnets),
        }
    return model


def _describe(job: JobSpec, instance: Instance) -> Iterator[str]:
    template = RunFolder(job.workdir / job.recipe.run.dir).model_dir / "chat_template.jinja"
    if template.is_file():
        yield "chat template: the one that the run was trained with"
    else:
        yield "chat template: none, so the endpoint continues a prompt, and refuses messages"
    price = "unknown" if instance.price is None else f"{instance.price.describe()} for training"
    yield f"cost: until `echelon cancel`; the price of each machine: {price}; AWS has other prices for endpoints"
