"""The methods that sum with fewer bytes: rounded values, thin matrices, a few values of each tensor, signs.

`Encoded` sends every value, rounded: each rank adds up its share of what all ranks sent, in fp32, and sends the rounded
sum. The others send a part, and add what they left out to the tensors of the next step (`Feedback`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.model.seeds import derive_seed
from echelon.learn.reduction.reducer import Feedback, Reducer, flatten, gather, write_back

_BLOCK = 256  # numbers with a scale of their own
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Code:
    """How values [n] are sent: `encode` returns bytes, and `decode` the rounded values of them, in fp32.

    multiple: n is a multiple of it.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    multiple: int = 1


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
    return Code(lambda values: values.to(dtype).view(torch.uint8), lambda sent: sent.view(dtype).float())


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


class PowerSGD(Feedback):
    """Vogels, Karimireddy & Jaggi, "PowerSGD" (arXiv:1905.13727), algorithms 1 and 2, with a warm start.

    A matrix [n, m] is sent as [n, r] and [m, r]; vectors, and matrices that this would not make smaller, as they are.
    Sums in place of the paper's means: the method is linear in the residuals.
    """

    def __init__(self, trained: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup, seed: int) -> None:
        matrices = {name: tensor for name, tensor in trained.items() if _is_thinner(tensor, rank)}
        super().__init__(matrices, group)
        self._right = {name: _random_matrix(tensor, rank, seed, name) for name, tensor in matrices.items()}

    @override
    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        whole = {name: tensor for name, tensor in tensors.items() if name not in self._right}
        matrices = {name: _as_matrix(self.correct(name, tensors[name])) for name in tensors if name in self._right}
        left = {name: matrix @ self._right[name] for name, matrix in matrices.items()}
        self._sum(left | whole)
        left = {name: torch.linalg.qr(matrix).Q for name, matrix in left.items()}
        right = {name: matrix.T @ left[name] for name, matrix in matrices.items()}
        for name, matrix in matrices.items():
            self.keep(name, matrix - left[name] @ right[name].T)
        self._sum(right)
        for name, product in right.items():
            self.update(self._right[name], product)
            tensors[name].copy_((left[name] @ product.T).view_as(tensors[name]))

    def _sum(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            flat = flatten(tensors)
            dist.all_reduce(flat, group=self._group)
            write_back(flat, tensors)

    @override
    def tensors(self) -> dict[str, Tensor]:
        """The thin matrices are the same on every rank."""
        return super().tensors() | {f"powersgd.{name}": tensor for name, tensor in self._right.items()}


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)


def _is_thinner(tensor: Tensor, rank: int) -> bool:
    return tensor.dim() > 1 and rank * sum(_as_matrix(tensor).shape) < tensor.numel()


def _random_matrix(tensor: Tensor, rank: int, seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.randn(_as_matrix(tensor).shape[1], rank, generator=generator).to(tensor.device)


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


class Signs(Feedback):
    """Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847), algorithm 2, for each block.

    A block, with a magnitude of its own (Zheng et al., arXiv:1905.10936, algorithm 1), is a row: the values along the
    last dimension. Rows of an embedding whose tokens no batch had stay zeros.

    Each rank sends every other rank one bit for each value, and 4 bytes for each block.
    """

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
    return (padded * torch.tensor(_BITS, device=bits.device)).sum(1).to(torch.uint8)


def _unpack(codes: Tensor, count: int) -> Tensor:
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=codes.device)
    return (codes[:, None] & weights).ne(0).flatten()[:count]


def _blocks(values: Tensor) -> Tensor:
    """Values as rows, [blocks, size]."""
    return values.reshape(-1, values.shape[-1] if values.dim() else 1)


def _decode(bits: Tensor, scales: Tensor, sizes: Tensor) -> Tensor:
    """Return scale * sign of values, given whether they are not negative, and the size of each block."""
    magnitudes = scales.repeat_interleave(sizes, output_size=len(bits))
    return torch.where(bits, magnitudes, -magnitudes)
