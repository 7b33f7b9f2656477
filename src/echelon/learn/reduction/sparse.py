"""Sums of a few values of each tensor: the largest of each rank, or random ones."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.model.seeds import derive_seed
from echelon.learn.reduction.reducer import Feedback, gather, write_back


def count_sent(size: int, fraction: float) -> int:
    """Return how many values are sent of a tensor of `size` values: at least one."""
    return max(1, int(fraction * size))


class TopK(Feedback):
    """Each rank sends its values of largest magnitude, and where they are: 8 bytes each to every other rank.

    Stich, Cordonnier & Jaggi (arXiv:1809.07599), with top-k of each tensor.
    """

    def __init__(self, trained: Mapping[str, Tensor], fraction: float, group: dist.ProcessGroup) -> None:
        super().__init__(trained, group)
        self._fraction = fraction
        self._group = group

    @override
    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        mine = self.choose(tensors)
        total = torch.zeros(sum(tensor.numel() for tensor in tensors.values()), device=mine.device)
        # One rank at a time: it sends each place once, so the order of every sum is fixed.
        for sent, where in gather(mine, self._group):
            total[where.long()] += sent.view(torch.float32)
        write_back(total, tensors)

    def choose(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the values of this rank to send, as bits, and their places in all tensors together: [2, n] int32.

        A value that is not a number is larger than all others for torch, so it is sent.
        """
        values, places, start = [], [], 0
        for name, tensor in tensors.items():
            corrected = self.correct(name, tensor).flatten()
            chosen = corrected.abs().topk(count_sent(tensor.numel(), self._fraction), sorted=False).indices
            values.append(corrected[chosen])
            places.append(chosen + start)
            self.keep(name, corrected.index_fill(0, chosen, 0.0))
            start += tensor.numel()
        return torch.stack([torch.cat(values).view(torch.int32), torch.cat(places).int()])


class RandomK(Feedback):
    """All ranks send the same random values, chosen anew in each step, so that their places need not be sent.

    Stich, Cordonnier & Jaggi (arXiv:1809.07599).
    """

    def __init__(self, trained: Mapping[str, Tensor], fraction: float, group: dist.ProcessGroup, seed: int) -> None:
        super().__init__(trained, group)
        self._fraction = fraction
        self._group = group
        self._seed = seed

    @override
    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """A value that is not finite is sent in any case, as the last one."""
        values, places, start = [], [], 0
        for name, tensor in tensors.items():
            corrected = self.correct(name, tensor).flatten()
            chosen = self._choose(step, name, tensor)
            values.append(corrected[chosen])
            places.append(chosen + start)
            self.keep(name, corrected.index_fill(0, chosen, 0.0))
            start += tensor.numel()
        poison = torch.stack([tensor.detach().float().sum() for tensor in tensors.values()]).sum() * 0
        sent = torch.cat([*values, poison.reshape(1)])
        dist.all_reduce(sent, group=self._group)
        total = torch.zeros(start, device=sent.device)
        total[torch.cat(places)] = sent[:-1]
        write_back(total + sent[-1], tensors)

    def _choose(self, step: int, name: str, tensor: Tensor) -> Tensor:
        generator = torch.Generator(tensor.device).manual_seed(derive_seed(self._seed, step, name))
        order = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)
        return order[: count_sent(tensor.numel(), self._fraction)]
