"""Copies the tensors of a save, so that training can continue while they are written."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from typing_extensions import override

_COPIERS = 4


class Stager(BlockingAsyncStager):
    """Copies the tensors of a save into the buffers of the previous save, which `save` waits for.

    New buffers would take several times as long as the copy, because every page must first be allocated and cleared.
    Without a GPU a few threads copy, since a single thread does not reach the memory bandwidth. With a GPU, torch's own
    cache is pinned memory, the fastest target for device copies.
    """

    def __init__(self) -> None:
        super().__init__(cache_staged_state_dict=True)
        self._shapes: dict[str, Any] = {}
        self._parts: list[BlockingAsyncStager] = []

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        shapes = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in state_dict.items()}
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
