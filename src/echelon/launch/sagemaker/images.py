"""Container images: AWS's PyTorch image in each region, and the PyTorch version in an image's tag."""

import re
from collections.abc import Mapping
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.launch.sagemaker.enter import OLDEST_PYTHON
from echelon.recipe.yaml_text import read_table

# PyTorch 2.13.0, Python 3.12, CUDA 13.3, NCCL 2.30.7, EFA 1.49: AWS Deep Learning Containers, changelog of 2026-07-20.
_GPU_TAG = "2.13-cu133-amzn2023-sagemaker"
_CPU_TAG = "2.13-cpu-amzn2023-sagemaker"
_REPOSITORY = "pytorch"

_ACCOUNT = "763104351884"
_ACCOUNTS: Mapping[str, str] = read_table(Path(__file__).with_name("image_accounts.yaml"))


def find_image(region: str, has_gpus: bool) -> str:
    """The URI of AWS's PyTorch image in a region."""
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    account = _ACCOUNTS.get(region, _ACCOUNT)
    return f"{account}.dkr.ecr.{region}.{domain}/{_REPOSITORY}:{_GPU_TAG if has_gpus else _CPU_TAG}"


# As in pyproject.toml.
OLDEST_TORCH = (2, 11)


def check_image(image: str) -> None:
    """Raise ConfigError for an AWS image whose tag has a PyTorch or Python version too old for echelon.

    Other images are checked when the container starts.
    """
    match = re.search(r"/(?:huggingface-)?(?:pytorch|smdistributed-modelparallel)[\w-]*:v?(\d+)\.(\d+)(.*)", image)
    if match is None:
        return
    python = re.search(r"-py(\d)(\d+)\b", match[3])
    for name, found, oldest in (
        ("PyTorch", (int(match[1]), int(match[2])), OLDEST_TORCH),
        ("Python", (int(python[1]), int(python[2])) if python else OLDEST_PYTHON, OLDEST_PYTHON),
    ):
        if found < oldest:
            raise ConfigError(
                f"launch.sagemaker.image={image} has {name} {found[0]}.{found[1]}, but echelon needs {oldest[0]}."
                f"{oldest[1]} or later; use a newer image, or remove launch.sagemaker.image to get {_GPU_TAG}."
            )
