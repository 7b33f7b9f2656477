"""Tests a save before training starts, so that a full disk or a missing permission is found immediately."""

import os
import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from echelon.ground.errors import CheckpointError
from echelon.ground.stored import sync_path
from echelon.learn.distributed.objects import gather_objects

# In addition to the tensors: the checkpoint's index, headers and alignment, and other writes to the disk meanwhile.
MARGIN_FRACTION = 0.05
MARGIN_BYTES_PER_TENSOR = 4096

_PROBE_BYTES = 4096


def rehearse_save(folder: Path, sizes: Mapping[str, int], group: dist.ProcessGroup, is_here: bool = True) -> None:
    """Perform the steps of a save with a small file per rank, and compare the free space with a checkpoint's size.

    Collective over `group`. Each rank writes and flushes a file in one hidden folder; rank 0 renames and removes the
    folder. Free space is that available to this user. A quota that the file system does not report is noticed only if
    it is exhausted.

    Args:
        sizes: the size in bytes of each full tensor of which this rank holds at least a part, by name. A checkpoint
            stores a name once, even if several ranks have it.
        is_here: whether this rank's machine has the checkpoint folder.

    Raises:
        CheckpointError: the same on every rank; no files are left behind.
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
            for rank, reason in enumerate(gather_objects(_attempt(action), group)):
                if reason is not None:
                    raise CheckpointError(
                        f"A checkpoint could not be saved to {folder}: rank {rank}: {reason}. Training has not "
                        "started; free space or choose another run.dir, and run the same command again."
                    )
    finally:
        if is_publisher:
            for probe in (writing, final):
                shutil.rmtree(probe, ignore_errors=True)
        dist.barrier(group)  # no rank may start another rehearsal in a folder that is being removed


def _attempt(action: Callable[[], None]) -> str | None:
    """Return why the action failed, to be shared with all ranks; None if it succeeded."""
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
            f"a checkpoint needs about {num_bytes:,} bytes ({needed:,} with a margin), and {free:,} are free on this "
            "disk"
        )
