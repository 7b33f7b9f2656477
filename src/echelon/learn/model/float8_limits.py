"""What a recipe needs for products in float8. Does not import torch."""

from collections.abc import Iterable

from echelon.ground.errors import ConfigError
from echelon.ground.extras import require_extra

_MULTIPLE = 16  # the kernels of products in float8 take tiles of this many rows and columns


def check_package() -> None:
    """Raise ConfigError if torchao is not installed."""
    require_extra("train.precision=fp8", "float8", "or use train.precision=bf16")


def has_fitting_size(rows: int, columns: int) -> bool:
    """Whether the product with a weight of these sizes can be in float8."""
    return rows % _MULTIPLE == columns % _MULTIPLE == 0


def check_sizes(model_type: str, sizes: Iterable[tuple[int, int]]) -> None:
    """Raise ConfigError if none of the linear layers in decoder layers, given by their sizes, can be in float8."""
    if not any(has_fitting_size(*size) for size in sizes):
        raise ConfigError(
            f"train.precision=fp8: the decoder layers of {model_type} have no linear layer whose sizes are multiples "
            f"of {_MULTIPLE}; use train.precision=bf16."
        )
