"""How workers send gradients to parameter servers: as bytes, whose number depends on the weights' shapes alone."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.learn.reduction import TopK
from echelon.learn.reduction.methods import BLOCKS, HALF, ROUNDED, WHOLE, Code, count_sent
from echelon.learn.reduction.reducer import flatten
from echelon.recipe.synchronization import CompressConfig

_CODES = {"none": WHOLE, "bf16": ROUNDED, "fp16": HALF, "int8": BLOCKS}


class PushCode:
    """Reads pushed gradients of a server's part. `sizes`: how many numbers its tensors have."""

    def __init__(self, config: CompressConfig, sizes: Sequence[int]) -> None:
        self._total = sum(sizes)
        self._code = _CODES.get(config.method)
        self.num_bytes = 8 * sum(count_sent(size, config.fraction) for size in sizes)
        if self._code is not None:
            self.num_bytes = len(self._code.encode(_pad(torch.zeros(self._total), self._code)))

    def decode(self, sent: Tensor) -> Tensor:
        """Return the values of all tensors, fp32, 1-D; 0 where none were sent."""
        if self._code is not None:
            return self._code.decode(sent)[: self._total]
        values, places = sent.view(torch.int32).view(2, -1)
        total = torch.zeros(self._total)
        total[places.long()] = values.view(torch.float32)
        return total


class Pusher:
    """Writes the gradients that a worker pushes; with `topk` it keeps what was not sent for its next push."""

    def __init__(self, config: CompressConfig, trained: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._code = _CODES.get(config.method)
        self._largest = None if self._code is not None else TopK(trained, config.fraction, group)

    def encode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the gradients of one server's part as bytes."""
        if self._largest is not None:
            return self._largest.choose(tensors).view(torch.uint8).flatten()
        assert self._code is not None
        return self._code.encode(_pad(flatten(tensors), self._code))

    def settle(self, commit: Tensor) -> None:
        """Keep what was not sent for the next push, where `commit` is true."""
        if self._largest is not None:
            self._largest.settle(commit)

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that a resumed run needs."""
        return {} if self._largest is None else self._largest.tensors()


def _pad(values: Tensor, code: Code) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % code.multiple))
