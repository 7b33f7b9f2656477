"""Snapshots of the training state in the memory of the ranks: each holds its own part, and that of another rank."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.learn.distributed.mesh import wait_for
from echelon.learn.distributed.objects import broadcast_object, gather_objects
from echelon.learn.model.sharding import local_part

# Of the places of tensors in a part, so that each can be looked at with its own dtype.
_ALIGNMENT_BYTES = 16


@dataclass
class SnapshotsByStep:
    """What a process holds of snapshots, also beyond the end of a process group: by the step that they are of.

    Attributes:
        own: the bytes of its own part.
        other: those of the part of another rank.
        states: what is not a tensor, as JSON values, the same on every rank.
        whole: the newest step of which all ranks held what they should, as far as this process knows.
    """

    own: dict[int, Tensor] = field(default_factory=dict)
    other: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    whole: int | None = None
    _spare: list[Tensor] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory for a part, that of a dropped one if there is one of this size: new pages take longer than a copy.

        With a GPU it is pinned.
        """
        for index, part in enumerate(self._spare):
            if part.numel() == num_bytes:
                return self._spare.pop(index)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def keep_only(self, step: int) -> None:
        """Drop what is of another step than this one, of which all ranks hold what they should."""
        self.whole = step
        self._spare.clear()
        for parts in (self.own, self.other):
            self._spare += [parts.pop(other) for other in list(parts) if other != step]
        for other in self.states.keys() - {step}:
            del self.states[other]


@dataclass(frozen=True)
class HeldSnapshot:
    """A snapshot of which every part is held.

    Attributes:
        source: the lowest rank that holds its own part.
        lost: the ranks that do not.
    """

    step: int
    source: int
    lost: tuple[int, ...]


class PeerMemory:
    """Saves the run's state to the memory of its ranks; the part of a lost rank is in that of another one.

    A snapshot is copied before the next operation on the device that `save` was called on, which may be after `save`
    returns. A thread sends it over a gloo group of its own. It replaces the one before when all ranks hold what they
    should: of two snapshots one is always whole. Every method is collective, except `is_due`, `fill` and `drop`.
    """

    def __init__(self, held: SnapshotsByStep, every_steps: int | None, distance: int) -> None:
        """`distance`: from a rank to the one that holds its part too. `every_steps`: None never takes a snapshot."""
        self._held = held
        self._every_steps = every_steps
        self._distance = distance
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", group_desc="snapshots")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._pending: Future[None] | None = None

    def is_due(self, done: int) -> bool:
        """Whether a snapshot is due after this number of steps."""
        return self._every_steps is not None and done % self._every_steps == 0

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Take a snapshot in the background. `state`: JSON values, the same on every rank."""
        self._wait()
        places, size = _arrange(tensors)
        part = self._held.allocate(size)
        for name, tensor in tensors.items():
            source = local_part(tensor.detach())
            _look(part, places[name], source).copy_(source, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        self._held.own[step], self._held.states[step] = part, dict(state)
        self._pending = self._thread.submit(self._send, step, copied)

    def _send(self, step: int, copied: torch.cuda.Event | None = None) -> None:
        """In the thread, exchange a snapshot with two other ranks, and drop the one before."""
        if copied is not None:
            copied.synchronize()
        held, to, source = self._held, self._holder(self._rank), (self._rank - self._distance) % self._size
        if to != self._rank:
            part = held.own[step]
            length = torch.zeros(1, dtype=torch.int64)
            _exchange(torch.tensor([part.numel()]), to, length, source, self._group)
            other = held.allocate(int(length))
            _exchange(part, to, other, source, self._group)
            held.other[step] = other
        dist.barrier(self._group)
        held.keep_only(step)

    def _holder(self, rank: int) -> int:
        return (rank + self._distance) % self._size

    def newest(self) -> HeldSnapshot | None:
        """The newest snapshot of which every part is held; None if there is none. The same on every rank."""
        by_rank = gather_objects((set(self._held.own), set(self._held.other), self._held.whole), None)
        # What a rank copied while another one was lost may be of a collective that was given up.
        for step in sorted({whole for *_, whole in by_rank if whole is not None}, reverse=True):
            lost = tuple(rank for rank, (steps, *_) in enumerate(by_rank) if step not in steps)
            if all(step in by_rank[self._holder(rank)][1] for rank in lost):
                return HeldSnapshot(step, next(rank for rank in range(self._size) if rank not in lost), lost)
        return None

    def fetch(self, snapshot: HeldSnapshot) -> dict[str, Any]:
        """Give the ranks that have lost their part of a snapshot theirs; returns what is not a tensor.

        Drops all other snapshots. In the background, every part is then sent to a second rank again.
        """
        held, step = self._held, snapshot.step
        held.states[step] = broadcast_object(held.states.get(step, {}), None, snapshot.source)
        for rank in snapshot.lost:
            holder = self._holder(rank)
            if self._rank == holder:
                dist.send(torch.tensor([held.other[step].numel()]), rank)
                dist.send(held.other[step], rank)
            elif self._rank == rank:
                length = torch.zeros(1, dtype=torch.int64)
                dist.recv(length, holder)
                held.own[step] = held.allocate(int(length))
                dist.recv(held.own[step], holder)
        held.keep_only(step)
        self._pending = self._thread.submit(self._send, step)
        return held.states[step]

    def fill(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of all tensors of a snapshot from it."""
        part, (places, size) = self._held.own[step], _arrange(tensors)
        assert size == part.numel(), "the plan of a run does not change while its processes live"
        for name, tensor in tensors.items():
            target = local_part(tensor.detach())
            target.copy_(_look(part, places[name], target))

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def drop(self) -> None:
        """After the process group has ended: wait for the thread. Not collective."""
        self._thread.shutdown()

    def close(self) -> None:
        """Wait for the pending snapshot."""
        self._wait()
        self._thread.shutdown()


def _arrange(tensors: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """Where this rank's part of each tensor begins, in bytes, and the bytes of all."""
    places, end = {}, 0
    for name in sorted(tensors):
        places[name] = end
        local = local_part(tensors[name].detach())
        num_bytes = local.numel() * local.element_size()
        end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, end


def _look(part: Tensor, place: int, like: Tensor) -> Tensor:
    """The tensor at a place of a part, of the shape and dtype of another one. Shares memory with the part."""
    num_bytes = like.numel() * like.element_size()
    return part[place : place + num_bytes].view(like.dtype).view(like.shape)


def _exchange(mine: Tensor, to: int, other: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Send a tensor to a rank, and receive another one from a rank."""
    wait_for([dist.isend(mine, to, group), dist.irecv(other, source, group)])
