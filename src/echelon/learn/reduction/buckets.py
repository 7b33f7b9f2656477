"""Sums of the buckets of gradients that a backward pass delivers, beside the rest of that pass."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from echelon.learn.reduction.reducer import Reducer


class Buckets:
    """Has a reducer sum one bucket after the other, on a CPU in a thread, so that the backward pass goes on.

    Ranks have the same buckets in the same order, and send nothing else in the reducer's group until `finish` has
    returned: collectives of two threads could be mixed up. On a GPU kernels wait for each sum in their stream.
    """

    def __init__(self, reducer: Reducer, device_type: str) -> None:
        self.reducer = reducer
        self._thread = None if device_type == "cuda" else ThreadPoolExecutor(1, thread_name_prefix="buckets")
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
