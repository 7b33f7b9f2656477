"""Exchanges between the ranks that share sequences. Gradients flow through them."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_to_all_single, wait_tensor
from typing_extensions import override

from echelon.learn.distributed.mesh import wait_for

BY_NUMBER: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Ranks that exchange, by the number that operations of torch get, because these take no objects."""

_NUMBERS = itertools.count()


def give_number(peers: Any) -> int:
    """Return a number by which operations find `peers` while they exist.

    It is a constant of compiled graphs, which a later process finds in the compiler's cache by the same number.
    """
    number = next(_NUMBERS)
    BY_NUMBER[number] = peers
    return number


def keep_received(tensor: Tensor) -> Tensor:
    """Return what other ranks have sent, or what stands for it, once it is there.

    Selective checkpointing keeps this, so that a repeated pass does not send again.
    """
    received: Tensor = wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return received


def send_rows(
    rows: Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, expected: list[int] | None = None
) -> Tensor:
    """Send rows to each rank of a group and return those received, both in the order of the ranks. Collective.

    Args:
        rows: [rows, ...].
        sent: the number of rows for each rank; None if all get as many.
        expected: the number of rows from each rank; None likewise.
    """
    return keep_received(all_to_all_single(rows.contiguous(), expected, sent, group))


class Peers(Protocol):
    """The ranks that share sequences. Every method is collective among them."""

    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, *shape]. The gradient is the sum over ranks of that of this part."""

    def swap(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i; return the parts received, [size, ...], by their rank."""

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor without gradient."""

    def shift(self, tensor: Tensor, stream: int = 0) -> Callable[[], Tensor]:
        """Begin to send a tensor to the next rank, the last one to the first. Has no gradient.

        Args:
            tensor: of the same shape and dtype on every rank; must not change until the result is there.
            stream: exchanges of different streams may overtake each other.

        Returns:
            A function that waits for the tensor of the rank before this one, and returns it.
        """

    def isolated(self) -> AbstractContextManager[None]:
        """Scope of exchanges that send nothing: the memory of real ones, with this rank's own values."""


class Isolatable:
    """Has a scope in which it sends nothing. `_sends`: whether it sends now."""

    _sends = True

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Scope in which this rank sends nothing and waits for no other: it has its own values alone."""
        self._sends = False
        try:
            yield
        finally:
            self._sends = True


class GroupPeers(Isolatable, Peers):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._number = give_number(self)

    @override
    def gather(self, part: Tensor) -> Tensor:
        """The gradients of a part are summed in fp32."""
        whole: Tensor = _gather(part, self._number)
        return whole

    @override
    def swap(self, parts: Tensor) -> Tensor:
        received: Tensor = _swap(parts, self._number)
        return received

    @override
    def add_up(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        if self._sends:
            dist.all_reduce(total, group=self._group)
        return total

    @override
    def shift(self, tensor: Tensor, stream: int = 0) -> Callable[[], Tensor]:
        sent = tensor.contiguous()
        if not self._sends:
            return sent.clone
        received, group = torch.empty_like(sent), self._group
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, tag=stream, group_peer=(self.rank + 1) % self.size),
                dist.P2POp(dist.irecv, received, group=group, tag=stream, group_peer=(self.rank - 1) % self.size),
            ]
        )

        def receive() -> Tensor:
            wait_for(works)
            return received

        return receive

    def collect(self, part: Tensor) -> Tensor:
        """`gather` without gradient."""
        if not self._sends:
            return part.expand(self.size, *part.shape).clone(memory_format=torch.contiguous_format)
        whole: Tensor = all_gather_tensor(part.contiguous().flatten(), 0, self._group)
        return keep_received(whole).view(self.size, *part.shape)

    def deliver(self, parts: Tensor) -> Tensor:
        """`swap` without gradient."""
        if not self._sends:
            return parts.clone(memory_format=torch.contiguous_format)
        return send_rows(parts, self._group)


@torch.library.custom_op("echelon::gather", mutates_args=())
def _gather(part: Tensor, peers: int) -> Tensor:
    """`GroupPeers.collect` as one operation of a compiled graph."""
    ranks: GroupPeers = BY_NUMBER[peers]
    return ranks.collect(part)


@torch.library.custom_op("echelon::swap", mutates_args=())
def _swap(parts: Tensor, peers: int) -> Tensor:
    """`GroupPeers.deliver` likewise. An exchange is its own inverse and transpose."""
    ranks: GroupPeers = BY_NUMBER[peers]
    return ranks.deliver(parts)


def _add_up_parts(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
    """A reduce-scatter, as an exchange and a sum: gloo's own sends twice the bytes."""
    received = _swap(gradients, ctx.peers)
    return received.sum(0, dtype=torch.float32).to(received.dtype), None


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.peers = inputs[1]


_gather.register_fake(lambda part, peers: part.new_empty(BY_NUMBER[peers].size, *part.shape))
_swap.register_fake(lambda parts, peers: parts.new_empty(parts.shape))
_gather.register_autograd(_add_up_parts, setup_context=_remember)
_swap.register_autograd(lambda ctx, gradients: (_swap(gradients, ctx.peers), None), setup_context=_remember)
