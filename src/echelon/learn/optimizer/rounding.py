"""Stochastic rounding to bf16, so that small updates take effect on average.

The random bits are a function of (seed, step, parameter, place in the whole tensor): the same on every rank that holds
a number, under every plan, and after a resume.
"""

import torch
from torch import Tensor

from echelon.learn.model.seeds import derive_seed
from echelon.learn.model.sharding import Places

_LOW_BITS = 0xFFFF
_ALL_BITS = -1

Lines = tuple[Tensor, Tensor]
"""Random numbers, int32, of the leading places of a tensor, [..., 1], and of those along its last dim, [..., width]."""


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up or down with chances in proportion to the nearness; `bits`: int32 in [0, 2^16), of that shape.

    A bf16 number is the upper half of an fp32 one, so adding a random lower half and cutting it off rounds away from
    zero exactly as often as the lower half says.
    """
    return ((values.view(torch.int32) + bits) & ~_LOW_BITS).view(torch.float32).bfloat16()


def round_to_nearest(values: Tensor) -> Tensor:
    """fp32 values rounded to bf16 numbers, still fp32.

    A compiler may leave out a cast to bf16 and back, and with it the rounding. So compiled code rounds the words, ties
    to the even one.
    """
    if not torch.compiler.is_compiling():
        return values.bfloat16().float()
    words = values.view(torch.int32)
    return ((words + (_LOW_BITS >> 1) + ((words >> 16) & 1)) & ~_LOW_BITS).view(torch.float32)


def random_bits(part: Places, device: torch.device, name: str, seed: int, step: int) -> Tensor:
    """16 random bits, as int32, for each number of the parameter `name` that lies at the places of `part`."""
    return spread_bits(random_lines(part, device, name, seed, step))


def random_lines(part: Places, device: torch.device, name: str, seed: int, step: int) -> Lines:
    """What `spread_bits` makes the random bits of: far fewer numbers."""
    key = derive_seed(seed, "rounding", step, name)
    words = (key & 0x7FFFFFFF, (key >> 31) & 0x7FFFFFFF)
    bits, line = torch.zeros((), dtype=torch.int32, device=device), torch.zeros((), dtype=torch.int32, device=device)
    for dim, piece in enumerate(part):
        # On the device: a copy from the host would wait for it.
        numbers = torch.arange(piece.start, piece.stop, device=device) if isinstance(piece, slice) else piece
        places = numbers.to(device, torch.int32)
        shape = [-1 if other == dim else 1 for other in range(len(part))]
        bits = spread_bits((bits, line), _ALL_BITS) if dim else bits
        line = (_mix(places ^ words[dim % 2]) + dim).view(shape)
    return bits, line


def spread_bits(lines: Lines, mask: int = _LOW_BITS) -> Tensor:
    """The random bits of each number, in the shape that `lines` broadcast to."""
    bits, line = lines
    return _mix(bits + line) & mask


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the result depends on every bit of the argument.

    "lowbias32" (Wellons 2018), in wrapping int32 arithmetic; masks make the shifts logical.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
