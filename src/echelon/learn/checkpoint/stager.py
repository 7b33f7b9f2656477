"""Copies the tensors of a save, so that training can continue while they are written."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from typing_extensions import override

_COPIERS = 4


class Stager(BlockingAsyncStager):
    """Copies the tensors of a save into the buffers of the previous save, which `save` waits for.

    New buffers would take several times as long as the copy, because every page must first be allocated and cleared.
    Without a GPU a few threads copy, since a single thread does not reach the memory bandwidth. With a GPU, torch's own
    cache is pinned memory, the fastest target for device copies. Pinning takes seconds for every ten gigabytes, so
    `prepare` does it in a thread.
    """

    def __init__(self) -> None:
        super().__init__(cache_staged_state_dict=True)
        self._shapes: dict[str, Any] = {}
        self._parts: list[BlockingAsyncStager] = []
        self._allocated: Future[Any] | None = None

    def prepare(self, tensors: Mapping[str, Any]) -> None:
        """With a GPU, begin to allocate the buffers for these tensors; the first `stage` of the same ones uses them."""
        if torch.cuda.is_available():
            self._shapes = _describe(tensors)
            allocator = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
            self._allocated = allocator.submit(_state_dict_utils._create_cpu_state_dict, dict(tensors), pin_memory=True)
            allocator.shutdown(wait=False)

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        allocated, self._allocated = self._allocated, None
        if allocated is not None:
            self.state_dict_cache = allocated.result()
        shapes = _describe(state_dict)
        if shapes != self._shapes:
            self._shapes, self._parts, self.state_dict_cache = shapes, [], None
        return super().stage(state_dict) if torch.cuda.is_available() else self._copy(state_dict)

    def _copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        names = list(state_dict)
        shares = [{name: state_dict[name] for name in names[first::_COPIERS]} for first in range(_COPIERS)]
        if not self._parts:
            self._parts = [BlockingAsyncStager(cache_staged_state_dict=True) for _ in shares]
            for part, share in zip(self._parts, shares, strict=True):
                part.state_dict_cache = BlockingAsyncStager().stage(share)
        with ThreadPoolExecutor(_COPIERS) as copiers:
            copies = list(copiers.map(lambda part, share: part.stage(share), self._parts, shares))
        return {name: copies[index % _COPIERS][name] for index, name in enumerate(names)}


def _describe(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}
