"""Verifies weight files against the tensors they were written from."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from echelon.ground.errors import CheckpointError


def check_weights(path: Path, written: Mapping[str, Tensor], what: str) -> None:
    """Read a safetensors file back, one tensor at a time, and compare it bit for bit.

    Args:
        what: a description of the expected values for the message: trained, or written.

    Raises:
        CheckpointError: the file has other tensors, or a tensor differs.
        SafetensorError: the file cannot be read.
    """
    with safe_open(path, "pt") as file:
        for name in sorted(set(file.keys()) ^ written.keys()):
            raise CheckpointError(f"{path} {'lacks' if name in written else 'contains an unknown'} {name}.")
        for name, tensor in written.items():
            stored = file.get_tensor(name)
            if (stored.shape, stored.dtype) != (tensor.shape, tensor.dtype) or not torch.equal(
                _bits(stored), _bits(tensor)
            ):
                raise CheckpointError(f"{path}: {name} differs from the {what} values; the disk may be damaged.")


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, so that NaN equals NaN."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8)
