"""Transfers checkpoints of machines without a shared folder: through an object store, or to rank 0's machine and back.

Every rank writes its file to a local folder. With an object store, all ranks upload theirs at once, and at a restart
each machine fetches the files that its ranks read: no machine handles more than its part. Without one, or while it
fails, ranks on other machines send their files to rank 0, which publishes the checkpoint as on a shared folder. It is
then complete on one machine, and does not depend on the others.
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.ground.checksums import ELSEWHERE, MANIFEST, Files, find_faults, list_files
from echelon.ground.errors import EchelonError
from echelon.ground.stored import read_bytes, sync_path
from echelon.learn.checkpoint.fill import find_needed, find_reason
from echelon.learn.checkpoint.folder import Checkpoint, fetch_files, find_source
from echelon.learn.distributed.objects import broadcast_object, gather_objects

if TYPE_CHECKING:
    from echelon.ground.object_store import ObjectStore

CHUNK_BYTES = 64 * 2**20
"""Size of a transferred chunk, and so the memory that a transfer needs."""

# Between attempts to upload a file. After them it goes to rank 0's machine: a run that is told to stop has little time.
_DELAYS_SECONDS = (1.0, 4.0)


class Uploads(Protocol):
    """Copies published checkpoints elsewhere, in the background. No method is collective."""

    def offer(self, checkpoint: Checkpoint, keep: int | None = None, if_missing: bool = False) -> Collection[int]:
        """Schedule the upload of a checkpoint; returns the steps whose checkpoints must stay until the next call.

        `keep`: the step of one to keep beside the newest few. `if_missing`: only if the copy lacks the checkpoint.
        """

    def begin(self, written: Checkpoint) -> str | None:
        """The folder to which ranks upload their files of a checkpoint that is written; None if none are taken now."""

    def finish(self, sent: Collection[str]) -> bool:
        """Publish in the store the checkpoint of `begin`, of which the ranks have sent these files; False if not."""

    def wait(self, seconds: float) -> bool:
        """Wait at most this long for the remaining uploads; return whether waiting is over."""

    def tell_unfinished(self) -> None:
        """Log and record the checkpoint that will not be uploaded before this process ends, if there is one."""


class Carrier:
    """Transfers files over a gloo group of all ranks. Every method except `writing` and `discard` is collective.

    `machine` identifies this machine; `scratch` is a local folder for files in transit, which no other run uses.
    `store` is the object store of the run's checkpoints; None without one.
    """

    def __init__(
        self, machine: str, scratch: Path, group: dist.ProcessGroup, store: "ObjectStore | None" = None
    ) -> None:
        machines = gather_objects(machine, group)
        self._group = group
        self._scratch = scratch
        self.store = store
        # The ranks of this machine divide what is done once per machine.
        self._peers = [rank for rank, name in enumerate(machines) if name == machine]
        self.part = self._peers.index(dist.get_rank()), len(self._peers)
        """Which share of its machine's work is this rank's, and how many shares there are."""
        self.kept_fraction = 1.0 if store is None else machines.count(machines[0]) / len(machines)
        """The part of a checkpoint that rank 0's machine keeps."""
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

    def upload(self, writing: Path, folder: str | None, described: Files) -> str | None:
        """Upload the files that this rank has written, to a folder of the object store that rank 0 names.

        Returns why it was not possible on a rank, the same on every rank.
        """
        # Here: most runs have no store.
        from echelon.ground.object_store import retried

        folder, reason = broadcast_object(folder, self._group), None
        if folder is None or self.store is None:
            return "the object store takes no files"
        try:
            for name in described:
                send = partial(self.store.upload, self.writing(writing) / name, f"{folder}/{name}")
                retried(send, _DELAYS_SECONDS, time.sleep)
        except Exception as error:  # of the client library too
            reason = find_reason(error)
        return next((reason for reason in gather_objects(reason, self._group) if reason is not None), None)

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
                    chunks = _chunks(size, partial(dist.recv, src=sender, group=self._group))
                    reason = _write_chunks(folder / name, chunks) or reason
        return self.discard(folder, reason)

    def discard(self, folder: Path, reason: str | None) -> str | None:
        """Remove this rank's files for `folder` if it is on another machine; return `reason`."""
        if not self.is_here:
            for path in list_files(self.writing(folder), f"__{dist.get_rank()}_*"):
                path.unlink()
        return reason

    def bring(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> tuple[Checkpoint, list[str]]:
        """Copy what this machine lacks of a checkpoint to its disk, and return it there; or its faults.

        From the object store only the files that the ranks of this machine read to fill `tensors`, which may be on the
        meta device; from rank 0's machine all. The ranks of a machine divide the files to hash.

        Raises OSError on all ranks if the disk of a machine is full, or the object store fails.
        """
        copy = Checkpoint(checkpoint.step, self._scratch / checkpoint.path.name)
        small = broadcast_object(_read_small(checkpoint.path) if dist.get_rank() == 0 else {}, self._group)
        failure: str | None = None
        faults: list[str] = []
        if ELSEWHERE in small:
            local = checkpoint if self.is_here else copy
            failure, faults = self._fetch(local.path, small, tensors)
        else:
            intact = self.is_here or _holds(checkpoint.path, small[MANIFEST], self.part)
            everywhere = gather_objects(intact, self._group)
            mine = all(everywhere[rank] for rank in self._peers)
            local = checkpoint if mine else copy
            if not all(everywhere):
                failure = self._broadcast(checkpoint.path, copy.path, wanted=not mine)
        if failures := [reason for reason in gather_objects(failure, self._group) if reason]:
            raise OSError(f"{checkpoint.path.name} could not be copied to every machine: {failures[0]}")
        return local, list(dict.fromkeys(chain(*gather_objects(faults, self._group))))

    def _fetch(
        self, folder: Path, small: Mapping[str, bytes], tensors: Mapping[str, Tensor]
    ) -> tuple[str | None, list[str]]:
        """Fetch this rank's share of the files that its machine needs. Returns why that failed, and damaged files."""
        if dist.get_rank() in self._firsts:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in small.items():
                (folder / name).write_bytes(content)
        dist.barrier(self._group)
        needed = gather_objects(find_needed(folder, tensors), self._group)
        names = sorted(set().union(*(needed[rank] for rank in self._peers)))
        try:
            return None, fetch_files(folder, names[self.part[0] :: self.part[1]])
        except (EchelonError, OSError) as error:
            return f"{find_source(folder)}: {error}", []

    def clear(self) -> None:
        """Remove the copies on this machine, after every rank has loaded them. Collective."""
        dist.barrier(self._group)
        if dist.get_rank() in self._firsts:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch.mkdir(parents=True)
        dist.barrier(self._group)

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
                chunks = _chunks(size, partial(dist.broadcast, src=0, group=self._receivers))
                reason = _write_chunks(copy / name if wanted else None, chunks) or reason
        return reason


def _read_small(folder: Path) -> dict[str, bytes]:
    """Read the manifest of a checkpoint, and the other small files if the large ones are elsewhere."""
    pattern = "*" if (folder / ELSEWHERE).exists() else MANIFEST
    return {path.name: read_bytes(path) for path in list_files(folder, pattern) if not path.name.startswith("__")}


def _holds(path: Path, manifest: bytes, part: tuple[int, int]) -> bool:
    """Whether a share of a folder's files is an intact copy of that of the checkpoint with this manifest."""
    with suppress(OSError):
        return (path / MANIFEST).read_bytes() == manifest and not find_faults(path, True, *part, whole=True)
    return False


def _chunks(size: int, fill: Callable[[Tensor], object]) -> Iterator[Tensor]:
    """Yield chunks of `size` bytes in total, each after `fill` has written its content."""
    for start in range(0, size, CHUNK_BYTES):
        chunk = torch.empty(min(size - start, CHUNK_BYTES), dtype=torch.uint8)
        fill(chunk)
        yield chunk


def _read_chunks(path: Path) -> Iterator[Tensor]:
    with path.open("rb") as file:
        yield from _chunks(path.stat().st_size, lambda chunk: file.readinto(chunk.numpy().data))


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
