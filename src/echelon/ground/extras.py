"""The optional packages: which extra has them, whether they are installed, and how a message says that one is not."""

import shlex
from importlib.util import find_spec

from echelon.ground.errors import ConfigError

# The extras of pyproject.toml for users, each with its requirements.
EXTRAS: dict[str, tuple[str, ...]] = {
    "peft": ("peft>=0.20",), "qlora": ("peft>=0.20", "bitsandbytes>=0.49"), "tensorboard": ("tensorboard>=2.16.2",),
    "data": ("datasets>=3", "pyarrow>=17", "zstandard>=0.22"), "mlflow": ("mlflow>=3.17,<4", "psutil>=6"),
    "wandb": ("wandb>=0.31,<1",), "prometheus": ("prometheus-client>=0.21",),
    "opentelemetry": ("opentelemetry-exporter-otlp-proto-http>=1.36",), "s3": ("s3fs>=2024.6",),
    "gcs": ("gcsfs>=2024.6",), "kubernetes": ("kubernetes>=32,<37",), "ray": ("ray[default]>=2.50",),
    "sagemaker": ("boto3>=1.42.44",),
    "sweep": ("optuna>=4,<6", "cmaes>=0.12", "scipy>=1.11", "scikit-learn>=1.4", "matplotlib>=3.8"),
    "float8": ("torchao>=0.16",), "liger": ("liger-kernel>=0.8",), "math": ("math-verify>=0.9",),
    "deepspeed": ("deepspeed>=0.19.8,<0.20",), "tensorflow": ("tensorflow-cpu>=2.21,<2.22", "keras-hub>=0.32,<0.33"),
    "lm-eval": ("lm-eval>=0.4.9", "accelerate>=1.1"), "etcd": ("etcd3gw>=2.5",),
}  # fmt: skip
# What an extra imports, if that is not one package of its own name.
_MODULES: dict[str, tuple[str, ...]] = {
    "qlora": ("peft", "bitsandbytes"), "data": ("datasets", "pyarrow", "zstandard"), "mlflow": ("mlflow", "psutil"),
    "prometheus": ("prometheus_client",), "opentelemetry": ("opentelemetry.exporter.otlp.proto.http",),
    "s3": ("s3fs",), "gcs": ("gcsfs",), "sagemaker": ("boto3",),
    "sweep": ("optuna", "cmaes", "scipy", "sklearn", "matplotlib"), "float8": ("torchao",),
    "liger": ("liger_kernel",), "math": ("math_verify",), "tensorflow": ("tensorflow", "keras_hub"),
    "lm-eval": ("lm_eval", "accelerate"), "etcd": ("etcd3gw",),
}  # fmt: skip


def pip_command(extra: str) -> str:
    """The command that installs what an extra adds, into any environment that has echelon, from a checkout or a wheel.

    It names the packages and not echelon: `pip install 'echelon[...]'` would install another project of that name.
    """
    return f"pip install {' '.join(map(shlex.quote, EXTRAS[extra]))}"


def find_missing_package(extra: str) -> str | None:
    """The first module of an extra that is not installed; None if all are."""
    return next((module for module in _MODULES.get(extra, (extra,)) if not is_installed(module)), None)


def missing_package(asked: str, package: str, extra: str, otherwise: str = "") -> ConfigError:
    """The error of `asked`, a recipe key or a kind of file, without a package of an extra. `otherwise`: another fix."""
    ending = f", {otherwise}." if otherwise else "."
    return ConfigError(
        f"{asked} requires the package {package}, which is not installed; run {pip_command(extra)}{ending}"
    )


def require_extra(asked: str, extra: str, otherwise: str = "") -> None:
    """Raise the error of `missing_package` for the first module of an extra that is not installed."""
    if (package := find_missing_package(extra)) is not None:
        raise missing_package(asked, package, extra, otherwise)


def is_installed(module: str) -> bool:
    """Whether a module could be imported; also one such as `a.b`, whose package `a` may be missing."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
