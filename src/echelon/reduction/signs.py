"""Sums of signs: one bit of each value, and the mean magnitude of each tensor."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.reduction.reducer import Feedback, gather, write_back

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Signs(Feedback):
    """Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847), algorithm 2, for each tensor.

    Each rank sends every other rank one bit for each value, and 4 bytes for each tensor. See Reducer.
    """

    def __init__(self, trained: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        super().__init__(trained)
        self._group = group

    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """See Reducer. The mean magnitude of a tensor with a value that is not finite is not finite either."""
        corrected = {name: self.correct(name, tensor).flatten() for name, tensor in tensors.items()}
        scales = torch.stack([values.abs().mean() for values in corrected.values()])
        bits = torch.cat([values >= 0 for values in corrected.values()])
        sizes = [len(values) for values in corrected.values()]
        rounded = torch.split(_decode(bits, scales, sizes), sizes)
        for (name, values), sent in zip(corrected.items(), rounded, strict=True):
            self.keep(name, values - sent)
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


def _decode(bits: Tensor, scales: Tensor, sizes: list[int]) -> Tensor:
    """Return scale * sign of values, given whether they are not negative."""
    counts = torch.tensor(sizes, device=scales.device)
    magnitudes = scales.repeat_interleave(counts, output_size=sum(sizes))
    return torch.where(bits, magnitudes, -magnitudes)
