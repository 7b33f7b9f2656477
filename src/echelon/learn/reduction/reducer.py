"""Sums of tensors over ranks with fewer bytes: the protocol, what methods have in common, and sums of buckets."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.distributed.replica_names import rank_name
from echelon.planner.replica_costs import SENT_AT_ONCE


class Reducer(Protocol):
    """Sums tensors over the ranks of a group. A value that is not finite on one rank is not finite on all of them."""

    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace tensors by their sum over the ranks, as far as it was sent. Collective, with the same names.

        `step`: its index; random choices depend on it.
        """

    def settle(self, commit: Tensor) -> None:
        """Keep what `reduce` has not sent for the next step where `commit` (a boolean scalar) is true.

        Otherwise the step has no effect on later ones.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that a resumed run needs. Those that differ between ranks have the rank's name."""


class Feedback(Reducer):
    """Error feedback: what a rank did not send is added to its tensors of the next step.

    Stich, Cordonnier & Jaggi, "Sparsified SGD with Memory" (arXiv:1809.07599); Karimireddy et al., "Error Feedback
    Fixes SignSGD" (arXiv:1901.09847).
    """

    def __init__(self, trained: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """`trained`: the tensors that will be summed over `group`, by name."""
        self._group, self._rank = group, dist.get_rank(group)
        self._residuals = {
            name: torch.zeros(like.shape, dtype=torch.float32, device=like.device) for name, like in trained.items()
        }
        self._updates: dict[int, tuple[Tensor, Tensor]] = {}

    def correct(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor with what was not sent before, in fp32: a new tensor."""
        return tensor.detach().float() + self._residuals[name]

    def keep(self, name: str, rest: Tensor) -> None:
        """Store what this rank has not sent of a tensor, until `settle`."""
        self.update(self._residuals[name], rest)

    def update(self, state: Tensor, value: Tensor) -> None:
        """Give a tensor of the state another value if the step is applied. The last call before `settle` counts."""
        self._updates[id(state)] = (state, value)

    @override
    def settle(self, commit: Tensor) -> None:
        for state, value in self._updates.values():
            state.copy_(torch.where(commit, value.view_as(state), state))
        self._updates.clear()

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {rank_name(self._rank, f"residual.{name}"): tensor for name, tensor in self._residuals.items()}


def gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the values of every rank, [ranks, ...]. Collective."""
    everyone = values.new_empty(group.size(), *values.shape)
    dist.all_gather(list(everyone.unbind()), values, group=group)
    return everyone


def divide(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in groups of about `SENT_AT_ONCE` numbers, in the same order on every rank."""
    bucket: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bucket[name] = tensor
        if sum(tensor.numel() for tensor in bucket.values()) >= SENT_AT_ONCE:
            yield bucket
            bucket = {}
    if bucket:
        yield bucket


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all values as one fp32 tensor."""
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors.values()])


def write_back(flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Write the result of `flatten` to the tensors that it was made of."""
    start = 0
    for tensor in tensors.values():
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


class Buckets:
    """Has a reducer sum one bucket after the other, on a CPU in a thread, so that the backward pass goes on.

    Ranks have the same buckets in the same order, and send nothing else in the reducer's group until `finish` has
    returned: collectives of two threads could be mixed up. On a GPU kernels wait for each sum in their stream.
    """

    def __init__(self, reducer: Reducer, has_thread: bool) -> None:
        self.reducer = reducer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buckets") if has_thread else None
        self._sums: list[Future[None]] = []

    def sum(self, step: int, tensors: Mapping[str, Tensor], buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Replace tensors by their sums over the ranks; return a future of `buffer`, of which they are views.

        The future also ends if the sum fails; `finish` raises the error. Collective: see Reducer.reduce.
        """
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        if self._thread is None:
            self._sum(step, tensors, buffer, done)
        else:
            self._sums.append(self._thread.submit(self._sum, step, tensors, buffer, done))
        return done

    @torch.no_grad()
    def _sum(
        self, step: int, tensors: Mapping[str, Tensor], buffer: Tensor, done: torch.futures.Future[Tensor]
    ) -> None:
        try:
            self.reducer.reduce(step, tensors)
        finally:
            done.set_result(buffer)

    def finish(self) -> None:
        """Wait for all sums. Raises the error of the first one that has failed."""
        sums, self._sums = self._sums, []
        for total in sums:
            total.result()
