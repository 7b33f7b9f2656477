"""Files of weights compared with what they were written from."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from echelon.errors import CheckpointError


def check_weights(path: Path, written: Mapping[str, Tensor], what: str) -> None:
    """Read a safetensors file back, a tensor at a time, and compare it bit for bit.

    Args:
        what: what the tensors are, for the message: trained, or written.

    Raises:
        CheckpointError: it holds other tensors, or one that differs.
        SafetensorError: it cannot be read.
    """
    with safe_open(path, "pt") as file:
        for name in sorted(set(file.keys()) ^ written.keys()):
            raise CheckpointError(f"{path} {'lacks' if name in written else 'holds an unknown'} {name}.")
        for name, tensor in written.items():
            found = file.get_tensor(name)
            if (found.shape, found.dtype) != (tensor.shape, tensor.dtype) or not torch.equal(
                _bits(found), _bits(tensor)
            ):
                raise CheckpointError(f"{path}: {name} is not what was {what}; the disk may be damaged.")


def _bits(tensor: Tensor) -> Tensor:
    """A whole tensor as bytes, so that a number that is none equals itself."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8)
