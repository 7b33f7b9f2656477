"""echelon for the container: its source as a zip, its entry point, and its requirements for pip."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from echelon.launch.sagemaker.install import NO_INDEX, OPTIONAL
from echelon.launch.shell import guard_setup, join_words
from echelon.planner.hardware.job_machines import find_machines
from echelon.recipe import Recipe
from echelon.recipe.engines import ENGINES

PACKAGE = Path(__file__).parents[2]
ENTRY = "/opt/ml/input/data/echelon/enter.py"
START = "/opt/ml/input/data/echelon/start.sh"
FAILURE = "/opt/ml/output/failure"

# As in pyproject.toml, without torch: the image has the build that fits its drivers.
CORE = (
    "transformers>=5.17,<6", "tokenizers>=0.22", "jinja2>=3.1.6", "safetensors>=0.6", "numpy>=1.26",
    "pydantic>=2.12,<3", "pyyaml>=6", "fsspec>=2024.6", "typer>=0.26", "rich>=13",
)  # fmt: skip
HELPFUL = ("nvidia-ml-py>=12; sys_platform == 'linux'",)  # reads the load of GPUs
EXTRAS: dict[str, tuple[str, ...]] = {
    "peft": ("peft>=0.20",),
    "qlora": ("peft>=0.20", "bitsandbytes>=0.49"),
    "tensorboard": ("tensorboard>=2.16.2",),
    "data": ("datasets>=3", "pyarrow>=17", "zstandard>=0.22"),
    "mlflow": ("mlflow>=3.17,<4", "psutil>=6"),
    "wandb": ("wandb>=0.31,<1",),
    "opentelemetry": ("opentelemetry-exporter-otlp-proto-http>=1.36",),
    "s3": ("s3fs>=2024.6",),
    "gcs": ("gcsfs>=2024.6",),
    "deepspeed": ("deepspeed>=0.19.8,<0.20",),
    "tensorflow": ("tensorflow-cpu>=2.21,<2.22", "keras-hub>=0.32,<0.33"),
    "float8": ("torchao>=0.16",),
    "math": ("math-verify>=0.9",),
    "sagemaker": ("boto3>=1.42.44",),
    "lm-eval": ("lm-eval>=0.4.9", "accelerate>=1.1"),
    "liger": ("liger-kernel>=0.8",),
}
# AWS's plugin, with which MLflow accepts the ARN of a SageMaker server as tracking URI.
_MLFLOW_OF_SAGEMAKER = "sagemaker-mlflow>=0.1"
_EARLIEST = (1980, 1, 1, 0, 0, 0)


def list_requirements(recipe: Recipe) -> str:
    """The recipe's requirements in the container, without torch, as the text of a requirements.txt."""
    needed = [*CORE, *(name for extra in list_extras(recipe) for name in EXTRAS.get(extra, ()))]
    if recipe.launch.sagemaker.mlflow_arn is not None:
        needed.append(_MLFLOW_OF_SAGEMAKER)
    helpful = [*HELPFUL, *(name for extra in _list_helpful_extras(recipe) for name in EXTRAS[extra])]
    options = [] if recipe.launch.sagemaker.wheels is None else [NO_INDEX]
    return "".join(f"{line}\n" for line in dict.fromkeys([*options, *needed, OPTIONAL, *helpful]))


def list_extras(recipe: Recipe) -> dict[str, str]:
    """The extras of echelon without which the recipe cannot train, each with the key that needs it.

    An engine that pip cannot install has no row in EXTRAS.
    """
    extras: dict[str, str] = {name: f"track: {name}" for name in recipe.track}
    if ENGINES[recipe.engine].package is not None:
        extras[recipe.engine] = f"engine={recipe.engine}"
    if recipe.train.precision == "fp8":
        extras["float8"] = "train.precision=fp8"
    if any(reward.name == "math" for reward in recipe.reward):
        extras["math"] = "reward=math"
    if recipe.evaluate.tasks:
        extras["lm-eval"] = "evaluate.tasks"
    if recipe.adapter.is_adapter:
        extras["qlora" if recipe.adapter.method == "qlora" else "peft"] = f"adapter.method={recipe.adapter.method}"
    if recipe.launch.sagemaker.secrets:
        extras["sagemaker"] = "launch.sagemaker.secrets"
    remote = recipe.checkpoint.remote or ""
    for scheme, extra in (("s3://", "s3"), ("gs://", "gcs")):
        if remote.startswith(scheme):
            extras[extra] = f"checkpoint.remote={remote}"
    return extras


def _list_helpful_extras(recipe: Recipe) -> Iterator[str]:
    # A folder may contain compressed or columnar files, so every own source gets the readers.
    if any(source.path != "python-stdlib" for source in (*recipe.data.train, *recipe.data.validation)):
        yield "data"
    # Its kernels are for layers that are not compiled, on GPUs.
    if recipe.train.compile is False and find_machines(recipe.launch).weakest.gpus:
        yield "liger"


def read_entry() -> bytes:
    """The container's entry point, `enter.py`."""
    return Path(__file__).with_name("enter.py").read_bytes()


def render_start(setup: tuple[str, ...], python: str) -> str:
    """A script that runs launch.setup and then `exec`s the entry point, since only process 1 gets signals.

    A failing line becomes the job's FailureReason.
    """
    return "\n".join(["#!/bin/bash", *guard_setup(setup, FAILURE), f"exec {join_words([python, ENTRY])}"]) + "\n"


def zip_package() -> bytes:
    """Zip echelon's source; the same source gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(PACKAGE.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = zipfile.ZipInfo(f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}", _EARLIEST)
                name.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(name, path.read_bytes())
    return buffer.getvalue()
