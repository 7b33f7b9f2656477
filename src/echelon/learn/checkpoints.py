"""Checkpoints that a learner writes and reads, in the format of runs."""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from echelon.ground.checksums import check_files
from echelon.ground.errors import CheckpointError
from echelon.learn.checkpoint.fill import fill_tensors
from echelon.learn.checkpoint.folder import Checkpoint, find_checkpoints
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.learn.distributed.objects import agree


class Checkpoints:
    """The stores of the folders that a learner saves to."""

    def __init__(self, keep_last: int) -> None:
        """`keep_last`: how many checkpoints of a folder are kept."""
        self._keep_last = keep_last
        self._stores: dict[Path, CheckpointStore] = {}  # each has process groups, which are formed once

    def save(self, folder: Path, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint; returns when it is complete. Collective. Raises CheckpointError if it is not."""
        store = self._stores.get(folder)
        if store is None:
            store = self._stores[folder] = CheckpointStore(folder, self._keep_last, asynchronous=False)
            store.rehearse(tensors)
        store.save(step, tensors, {"train": {"step": step}})
        if store.is_saving:
            raise CheckpointError(f"{folder}: the checkpoint of step {step} could not be written.")

    def close(self) -> None:
        """Release all stores. Collective."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()


def find_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint that a folder is, or the newest one in it, after verifying its checksums. Collective.

    Raises CheckpointError, on every rank, if there is none or it is damaged.
    """

    def find() -> Checkpoint:
        siblings = {checkpoint.path.name: checkpoint for checkpoint in find_checkpoints(folder.parent)}
        checkpoints = [siblings[folder.name]] if folder.name in siblings else find_checkpoints(folder)
        if not checkpoints:
            raise CheckpointError(
                f"{folder} has no checkpoint (step-NNNNNNNN); give a folder that Learner.save has written."
            )
        check_files(checkpoints[-1].path, checksums=True)
        return checkpoints[-1]

    return agree(find)


def fill_from(checkpoint: Checkpoint, group: dist.ProcessGroup, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from a checkpoint, whatever plan wrote it. Collective over `group`."""
    fill_tensors(checkpoint.path, tensors, process_group=group)
