"""Sums of signs: one bit of each value, and the mean magnitude of each row."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.reduction.reducer import Feedback, gather, write_back

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Signs(Feedback):
    """Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847), algorithm 2, for each block.

    A block, with a magnitude of its own (Zheng et al., arXiv:1905.10936, algorithm 1), is a row: the values along the
    last dimension. Rows of an embedding whose tokens no batch had stay zeros.

    Each rank sends every other rank one bit for each value, and 4 bytes for each block.
    """

    def __init__(self, trained: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        super().__init__(trained, group)
        self._group = group

    @override
    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """The mean magnitude of a block with a value that is not finite is not finite either."""
        corrected = {name: _blocks(self.correct(name, tensor)) for name, tensor in tensors.items()}
        scales = torch.cat([blocks.abs().mean(1) for blocks in corrected.values()])
        bits = torch.cat([(blocks >= 0).flatten() for blocks in corrected.values()])
        shapes = [blocks.shape for blocks in corrected.values()]
        sizes = torch.cat([torch.full((count,), size, device=scales.device) for count, size in shapes])
        rounded = torch.split(_decode(bits, scales, sizes), [count * size for count, size in shapes])
        for (name, blocks), sent in zip(corrected.items(), rounded, strict=True):
            self.keep(name, blocks.flatten() - sent)
        mine = torch.cat([_pack(bits), scales.view(torch.uint8)])
        total = torch.zeros(len(bits), device=mine.device)
        for received in gather(mine, self._group):
            codes, last = received[: -4 * len(scales)], received[-4 * len(scales) :]
            total += _decode(_unpack(codes, len(bits)), last.clone().view(torch.float32), sizes)
        write_back(total, tensors)


def _pack(bits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (padded * torch.tensor(_WEIGHTS, device=bits.device)).sum(1).to(torch.uint8)


def _unpack(codes: Tensor, count: int) -> Tensor:
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=codes.device)
    return (codes[:, None] & weights).ne(0).flatten()[:count]


def _blocks(values: Tensor) -> Tensor:
    """Values as rows, [blocks, size]."""
    return values.reshape(-1, values.shape[-1] if values.dim() else 1)


def _decode(bits: Tensor, scales: Tensor, sizes: Tensor) -> Tensor:
    """Return scale * sign of values, given whether they are not negative, and the size of each block."""
    magnitudes = scales.repeat_interleave(sizes, output_size=len(bits))
    return torch.where(bits, magnitudes, -magnitudes)
