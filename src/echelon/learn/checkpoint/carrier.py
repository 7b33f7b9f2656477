"""Transfers checkpoints between machines without a shared folder: stored on rank 0's, copied to the others to load.

A rank on another machine writes its file to a local folder and sends it to rank 0, which publishes the checkpoint as
on a shared folder. The checkpoint is therefore complete on one machine, and does not depend on the others.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.ground.checksums import MANIFEST, find_faults, list_files
from echelon.ground.stored import sync_path
from echelon.learn.checkpoint.folder import Checkpoint
from echelon.learn.distributed.objects import broadcast_object, gather_objects

CHUNK_BYTES = 64 * 2**20
"""Size of a transferred chunk, and so the memory that a transfer needs."""


class Carrier:
    """Transfers files over a gloo group of all ranks. Every method except `writing` and `discard` is collective.

    `machine` identifies this machine; `scratch` is a local folder for files in transit, which no other run uses.
    """

    def __init__(self, machine: str, scratch: Path, group: dist.ProcessGroup) -> None:
        machines = gather_objects(machine, group)
        self._group = group
        self._scratch = scratch
        self._elsewhere = [rank for rank, name in enumerate(machines) if name != machines[0]]
        # One rank of each machine receives files for all its ranks.
        self._firsts = [rank for rank in self._elsewhere if machines.index(machines[rank]) == rank]
        self._receivers = dist.new_group([0, *self._firsts], backend="gloo", group_desc="checkpoint files")
        self.is_here = dist.get_rank() not in self._elsewhere
        """Whether this is rank 0's machine, whose disk holds the checkpoints."""
        self.clear()

    def writing(self, folder: Path) -> Path:
        """Return the folder in which this rank writes its part of `folder` on rank 0."""
        return folder if self.is_here else self._scratch / folder.name

    def collect(self, folder: Path) -> str | None:
        """Send the files of ranks on other machines to rank 0, into `folder`. Rank 0 returns why that failed, if so."""
        rank, reason = dist.get_rank(), None
        mine = list_files(self.writing(folder), f"__{rank}_*") if not self.is_here else []
        listed = gather_objects([(path.name, path.stat().st_size) for path in mine], self._group)
        for sender in self._elsewhere:
            for name, size in listed[sender]:
                if rank == sender:
                    for chunk in _read_chunks(self.writing(folder) / name):
                        dist.send(chunk, 0, group=self._group)
                elif rank == 0:
                    chunks = self._receive(sender, size)
                    reason = _write_chunks(folder / name, chunks) or reason
        return self.discard(folder, reason)

    def discard(self, folder: Path, reason: str | None) -> str | None:
        """Remove this rank's files for `folder` if it is on another machine; return `reason`."""
        if not self.is_here:
            for path in list_files(self.writing(folder), f"__{dist.get_rank()}_*"):
                path.unlink()
        return reason

    def bring(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint on this machine's disk, after copying it from rank 0's machine if necessary.

        Raises OSError on all ranks if the disk of a machine is full.
        """
        manifest = (checkpoint.path / MANIFEST).read_bytes() if dist.get_rank() == 0 else b""
        manifest = broadcast_object(manifest, self._group)  # on all ranks, also those whose disk has the checkpoint
        mine = self.is_here or _holds(checkpoint.path, manifest)
        copy = self._scratch / checkpoint.path.name
        if not all(gather_objects(mine, self._group)):
            faults = gather_objects(self._broadcast(checkpoint.path, copy, wanted=not mine), self._group)
            if any(faults):
                raise OSError(next(fault for fault in faults if fault))
        return checkpoint if mine else Checkpoint(checkpoint.step, copy)

    def clear(self) -> None:
        """Remove the copies on this machine, after every rank has loaded them. Collective."""
        dist.barrier(self._group)
        if dist.get_rank() in self._firsts:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch.mkdir(parents=True)
        dist.barrier(self._group)

    def _receive(self, sender: int, size: int) -> Iterator[Tensor]:
        for length in _lengths(size):
            chunk = torch.empty(length, dtype=torch.uint8)
            dist.recv(chunk, sender, group=self._group)
            yield chunk

    def _broadcast(self, source: Path, copy: Path, wanted: bool) -> str | None:
        """Send all files of a folder of rank 0 to one rank of each other machine. Returns why a write failed here."""
        rank, reason = dist.get_rank(), None
        if rank != 0 and rank not in self._firsts:
            return None
        listed = [(path.name, path.stat().st_size) for path in list_files(source)] if rank == 0 else []
        files = broadcast_object(listed, self._receivers)
        if rank != 0 and wanted:
            copy.mkdir(parents=True, exist_ok=True)
        for name, size in files:
            if rank == 0:
                for chunk in _read_chunks(source / name):
                    dist.broadcast(chunk, 0, group=self._receivers)
            else:
                chunks = self._follow(size)
                reason = _write_chunks(copy / name if wanted else None, chunks) or reason
        return reason

    def _follow(self, size: int) -> Iterator[Tensor]:
        for length in _lengths(size):
            chunk = torch.empty(length, dtype=torch.uint8)
            dist.broadcast(chunk, 0, group=self._receivers)
            yield chunk


def _holds(path: Path, manifest: bytes) -> bool:
    """Whether a folder is an intact copy of the checkpoint with this manifest."""
    with suppress(OSError):
        return (path / MANIFEST).read_bytes() == manifest and not find_faults(path, checksums=True)
    return False


def _lengths(size: int) -> Iterator[int]:
    while size > 0:
        yield min(size, CHUNK_BYTES)
        size -= CHUNK_BYTES


def _read_chunks(path: Path) -> Iterator[Tensor]:
    with path.open("rb") as file:
        for length in _lengths(path.stat().st_size):
            chunk = torch.empty(length, dtype=torch.uint8)
            file.readinto(chunk.numpy().data)
            yield chunk


def _write_chunks(path: Path | None, chunks: Iterator[Tensor]) -> str | None:
    """Write a file from received chunks. Receives all of them even if writing fails: the sender must not block."""
    reason = None
    try:
        if path is not None:
            with path.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk.numpy().data)
            sync_path(path)
    except OSError as error:
        reason = str(error)
    for _ in chunks:
        pass
    return reason
