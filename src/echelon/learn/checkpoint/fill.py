"""Fills tensors from a checkpoint, whatever plan wrote it."""

import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from echelon.ground.checksums import check_files
from echelon.ground.errors import CheckpointError, is_disk_full
from echelon.learn.checkpoint.safety import SafeReader, read_metadata
from echelon.learn.distributed.replica_names import find_ranks, match_replicas

logger = logging.getLogger(__name__)

# Messages of torch's writer, without an errno, when the disk fills up in the middle of a file.
_CUT_SHORT = re.compile(r"PytorchStreamWriter failed|unexpected pos|file write failed")


def fill_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Fill tensors in place, full or sharded. Collective, unless `options` of DCP's `load` contain `no_dist`.

    Tensors that differ between replicas (`replica_names.py`) may come from another number of replicas. Those of a rank
    are set to 0 if another number of ranks saved them.

    Raises:
        CheckpointError: the checkpoint is hostile, lacks a tensor, or has another shape.
    """
    saved = read_metadata(folder).state_dict_metadata
    matched = match_replicas(_drop_ranks(tensors, saved, options.get("process_group")), saved)
    for name, tensor in matched.items():
        entry = saved.get(name)
        if entry is None:
            raise CheckpointError(f"Checkpoint {folder} has no {name}; it belongs to another model or optimizer.")
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != tensor.shape:
            raise CheckpointError(
                f"Checkpoint {folder} has {name} with shape {tuple(entry.size)}, and the recipe's model has shape "
                f"{tuple(tensor.shape)}; it belongs to another model."
            )
    try:
        load(dict(matched), storage_reader=SafeReader(folder), **options)
    except CheckpointException as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {find_reason(error)}.") from error


def _drop_ranks(
    tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Mapping[str, torch.Tensor]:
    """Return the tensors without those of ranks if the number of ranks has changed; the others are set to 0."""
    dropped = {name: tensor for name, tensor in tensors.items() if find_ranks([name])}
    count = len(find_ranks(saved))
    if not dropped or not dist.is_initialized() or count == dist.get_world_size(group):
        return tensors
    for tensor in dropped.values():
        tensor.zero_()
    if dist.get_rank(group) == 0:
        logger.warning(
            f"The checkpoint has gradients that {count} processes had not sent yet (sync.compress). There are "
            f"{dist.get_world_size(group)} processes now, so these gradients are dropped."
        )
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}


def load_alone(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, full or sharded, without communication: each process reads its own part. Raises CheckpointError."""
    check_files(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        fill_tensors(folder, tensors, no_dist=True)


def find_reason(error: BaseException) -> str:
    """Return the reason of the first rank that failed; DCP wraps the errors of all ranks into one exception."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip()
    if is_disk_full(error) or "No space left" in text:
        return "No space left on device: the disk is full"
    if _CUT_SHORT.search(text):
        return "a file was truncated; the disk may be full"
    return (text.splitlines() or [type(error).__name__])[0]
