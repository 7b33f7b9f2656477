"""Sums of rounded values: each rank adds up its share of what all ranks sent, in fp32, and sends the rounded sum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.reduction.reducer import Reducer, flatten, gather, write_back

_BLOCK = 256  # numbers with a scale of their own


@dataclass(frozen=True)
class Code:
    """How values [n] are sent: `encode` returns bytes, and `decode` the rounded values of them, in fp32.

    multiple: n is a multiple of it.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    multiple: int = 1


def _encode_as(dtype: torch.dtype, values: Tensor) -> Tensor:
    return values.to(dtype).view(torch.uint8)


def _decode_as(dtype: torch.dtype, sent: Tensor) -> Tensor:
    return sent.view(dtype).float()


def _encode_blocks(values: Tensor) -> Tensor:
    """Round to 8 bits, relative to the largest value of each block of 256; a block's scale follows its codes."""
    blocks = values.view(-1, _BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    # A block of zeros has the scale 0. One with a value that is not finite has such a scale, whatever its codes are.
    codes = (blocks / scales).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=1).flatten()


def _decode_blocks(sent: Tensor) -> Tensor:
    rows = sent.view(-1, _BLOCK + 4)
    scales = rows[:, _BLOCK:].contiguous().view(torch.float32)
    return (rows[:, :_BLOCK].contiguous().view(torch.int8).float() * scales).flatten()


def _code_as(dtype: torch.dtype) -> Code:
    return Code(partial(_encode_as, dtype), partial(_decode_as, dtype))


WHOLE = _code_as(torch.float32)
ROUNDED, HALF = _code_as(torch.bfloat16), _code_as(torch.float16)
BLOCKS = Code(_encode_blocks, _decode_blocks, _BLOCK)


class Encoded(Reducer):
    """Sends every value, rounded: twice, as it is sent to the rank that sums it, and as the sum is sent to all.

    Each rank sends 2 (n - 1) / n of the encoded bytes over n ranks, as by a ring.
    """

    def __init__(self, code: Code, group: dist.ProcessGroup) -> None:
        self._code = code
        self._group = group

    @override
    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        write_back(self.sum(flatten(tensors)), tensors)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of values [n] over the ranks, in fp32. Collective."""
        size = self._group.size()
        padded = torch.nn.functional.pad(values, (0, -len(values) % (size * self._code.multiple)))
        sent = self._code.encode(padded)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        share = self._code.decode(received).view(size, -1).sum(0)
        sums = gather(self._code.encode(share), self._group).flatten()
        return self._code.decode(sums)[: len(values)]

    @override
    def settle(self, commit: Tensor) -> None:
        """Nothing is kept."""

    @override
    def tensors(self) -> dict[str, Tensor]:
        """No tensors."""
        return {}
