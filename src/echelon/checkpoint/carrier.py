"""Checkpoints between machines that share no folder: whole on rank 0's, brought to the others when one is loaded.

A rank elsewhere writes its file into a folder of its machine's own and sends it to rank 0, which publishes the
checkpoint as it does on a shared folder. So there is one checkpoint, on one machine, whatever becomes of the others.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint.folder import Checkpoint
from echelon.runs.checksums import MANIFEST, find_faults
from echelon.stored import sync_path

CHUNK_BYTES = 64 * 2**20
"""What is sent at a time, and what it costs in memory."""


class Carrier:
    """Carries files over a gloo group of all ranks. Every method but `writing` and `discard` is collective.

    `machine` tells the machines apart; `scratch` is a folder of this one for what is on its way, which other runs do
    not use.
    """

    def __init__(self, machine: str, scratch: Path, group: dist.ProcessGroup) -> None:
        machines = [""] * dist.get_world_size()
        dist.all_gather_object(machines, machine, group=group)
        self._group = group
        self._scratch = scratch
        self._elsewhere = [rank for rank, name in enumerate(machines) if name != machines[0]]
        # One rank of each machine receives for all of it.
        self._firsts = [rank for rank in self._elsewhere if machines.index(machines[rank]) == rank]
        self._receivers = dist.new_group([0, *self._firsts], backend="gloo")
        self.is_here = dist.get_rank() not in self._elsewhere
        """Whether this is rank 0's machine, whose disk holds the checkpoints."""
        self.clear()

    def writing(self, beside: Path) -> Path:
        """Where this rank writes what rank 0 will have in `beside`."""
        return beside if self.is_here else self._scratch / beside.name

    def collect(self, beside: Path) -> str | None:
        """Send what each rank elsewhere wrote to rank 0, into `beside`. On rank 0: why that failed, if it did."""
        rank, reason = dist.get_rank(), None
        mine = sorted(self.writing(beside).glob(f"__{rank}_*")) if not self.is_here else []
        listed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(listed, [(path.name, path.stat().st_size) for path in mine], group=self._group)
        for sender in self._elsewhere:
            for name, size in listed[sender]:
                if rank == sender:
                    for chunk in _read_chunks(self.writing(beside) / name):
                        dist.send(chunk, 0, group=self._group)
                elif rank == 0:
                    chunks = self._receive(sender, size)
                    reason = _write_chunks(beside / name, chunks) or reason
        return self.discard(beside, reason)

    def discard(self, beside: Path, reason: str | None) -> str | None:
        """Remove what a rank elsewhere wrote for `beside`; returns `reason`."""
        if not self.is_here:
            for path in self.writing(beside).glob(f"__{dist.get_rank()}_*"):
                path.unlink()
        return reason

    def bring(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as this machine's disk has it, brought from rank 0's where it has not.

        Raises OSError on the ranks of a machine whose disk has no room.
        """
        manifest = [(checkpoint.path / MANIFEST).read_bytes() if dist.get_rank() == 0 else b""]
        dist.broadcast_object_list(manifest, src=0, group=self._group)
        mine = self.is_here or _holds(checkpoint.path, manifest[0])
        have = [True] * dist.get_world_size()
        dist.all_gather_object(have, mine, group=self._group)
        copy = self._scratch / checkpoint.path.name
        if not all(have):
            faults: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(faults, self._broadcast(checkpoint.path, copy, wanted=not mine), group=self._group)
            if any(faults):
                raise OSError(next(fault for fault in faults if fault))
        return checkpoint if mine else Checkpoint(checkpoint.step, copy)

    def clear(self) -> None:
        """Remove what was brought here; every rank has loaded it. Collective."""
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
        """All files of a folder of rank 0, to one rank of each other machine. Why this one could not keep them."""
        rank, reason = dist.get_rank(), None
        if rank != 0 and rank not in self._firsts:
            return None
        files = [[(path.name, path.stat().st_size) for path in sorted(source.iterdir())] if rank == 0 else []]
        dist.broadcast_object_list(files, src=0, group=self._receivers)
        if rank != 0 and wanted:
            copy.mkdir(parents=True, exist_ok=True)
        for name, size in files[0]:
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
    """Whether a folder is the checkpoint of this manifest, whole."""
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
    """Write a file from what arrives. Takes all of it, also where the disk does not: the sender must not wait."""
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
