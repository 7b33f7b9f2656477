"""The part of each sequence that one of several ranks holds under context parallelism."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequencePart:
    """Two of `2 * size` equal chunks of a sequence: `rank`, and `2 * size - 1 - rank`.

    With a causal mask later positions attend to more keys. The two chunks together attend to the same number of keys
    on every rank: (rank + 1) + (2 * size - rank) chunks of keys.
    """

    rank: int
    size: int

    @property
    def chunks(self) -> tuple[int, int]:
        """The indices of this rank's chunks, in the order in which it holds them."""
        return self.rank, 2 * self.size - 1 - self.rank

    def take(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's part of a tensor along `dim`, whose length is a multiple of 2 * size."""
        chunks = whole.chunk(2 * self.size, dim)
        return torch.cat([chunks[index] for index in self.chunks], dim)


def in_order(parts: Tensor, dim: int) -> Tensor:
    """Return whole sequences from the parts of all ranks, [size, ...]; `dim`: of the sequence in one part."""
    firsts, seconds = parts.chunk(2, dim + 1)
    return torch.cat([*firsts.unbind(0), *seconds.flip(0).unbind(0)], dim)


def in_parts(whole: Tensor, size: int, dim: int) -> Tensor:
    """Return the parts of all ranks, [size, ...], from whole sequences: the inverse of `in_order`."""
    return torch.stack([SequencePart(rank, size).take(whole, dim) for rank in range(size)])
