"""Tests a save before training starts, so that a full disk or a missing permission is found immediately."""

import os
import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from echelon.errors import CheckpointError
from echelon.stored import sync_path

# Beside the tensors: the index of the checkpoint, headers and alignment, what else writes to the disk meanwhile.
MARGIN_FRACTION = 0.05
MARGIN_BYTES_PER_TENSOR = 4096

_PROBE_BYTES = 4096


def rehearse_save(folder: Path, sizes: Mapping[str, int], group: dist.ProcessGroup, is_here: bool = True) -> None:
    """Do what a save does, with a small file of each rank, and compare the free space with a checkpoint's size.

    Collective over `group`. Each rank writes and flushes its file into one hidden folder; rank 0 renames and removes
    it. Space is that of the file system as this user may use it; of a quota that the file system does not tell of, only
    one that is used up is noticed.

    Args:
        sizes: the bytes of each whole tensor that this rank holds all or a part of, by name. Of what several ranks
            have under one name a checkpoint holds one.
        is_here: whether the folder of this rank's machine is the one that is written to.

    Raises:
        CheckpointError: the same on every rank; nothing is left behind.
    """
    writing, final = folder / ".writing-probe", folder / ".removing-probe"
    is_publisher = dist.get_rank(group) == 0
    everyone: list[Mapping[str, int]] | None = [{}] * dist.get_world_size(group) if is_publisher else None
    dist.gather_object(sizes, everyone, group=group, group_dst=0)

    def write() -> None:
        if not is_here:
            return
        writing.mkdir(exist_ok=True)
        with (writing / f"rank-{dist.get_rank(group)}").open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def publish() -> None:
        if is_publisher:
            sync_path(writing)
            writing.rename(final)
            sync_path(folder)
            _check_space(folder, dict(ChainMap(*map(dict, everyone or []))))

    try:
        for action in (write, publish):
            reasons: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(reasons, _attempt(action), group=group)
            for rank, reason in enumerate(reasons):
                if reason is not None:
                    raise CheckpointError(
                        f"A checkpoint could not be saved to {folder}: rank {rank}: {reason}. Nothing was trained yet; "
                        "make room or choose another run.dir, and start the same command again."
                    )
    finally:
        if is_publisher:
            for probe in (writing, final):
                shutil.rmtree(probe, ignore_errors=True)
        dist.barrier(group)  # none may begin another rehearsal in a folder that is being removed


def _attempt(action: Callable[[], None]) -> str | None:
    """Why it failed, for all ranks to hear of; None if it did not."""
    try:
        action()
    except OSError as error:
        return str(error.strerror or error)
    except CheckpointError as error:
        return str(error)
    return None


def _check_space(folder: Path, sizes: Mapping[str, int]) -> None:
    num_bytes = sum(sizes.values())
    needed = round(num_bytes * (1 + MARGIN_FRACTION)) + len(sizes) * MARGIN_BYTES_PER_TENSOR
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"one takes about {num_bytes:,} bytes, with a margin {needed:,}, and {free:,} are free on this disk"
        )
