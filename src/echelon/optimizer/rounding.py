"""Stochastic rounding to bf16, so that small updates take effect on average.

The random bits are a function of (seed, step, parameter, place in the whole tensor): the same on every rank that holds
a number, under every plan, and after a resume.
"""

import torch
from torch import Tensor

from echelon.model.seeds import derive_seed
from echelon.model.sharding import Places

_LOW_BITS = 0xFFFF


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up or down with chances in proportion to the nearness; `bits`: int32 in [0, 2^16), of that shape.

    A bf16 number is the upper half of an fp32 one, so adding a random lower half and cutting it off rounds away from
    zero exactly as often as the lower half says.
    """
    return ((values.view(torch.int32) + bits) & ~_LOW_BITS).view(torch.float32).bfloat16()


def random_bits(part: Places, device: torch.device, name: str, seed: int, step: int) -> Tensor:
    """16 random bits, as int32, for each number of the parameter `name` that lies at the places of `part`."""
    key = derive_seed(seed, "rounding", step, name)
    words = (key & 0x7FFFFFFF, (key >> 31) & 0x7FFFFFFF)
    bits = torch.zeros((), dtype=torch.int32, device=device)
    for dim, piece in enumerate(part):
        numbers = torch.arange(piece.start, piece.stop) if isinstance(piece, slice) else piece
        places = numbers.to(device, torch.int32)
        shape = [-1 if other == dim else 1 for other in range(len(part))]
        bits = _mix(bits + (_mix(places ^ words[dim % 2]) + dim).view(shape))
    return bits & _LOW_BITS


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the result depends on every bit of the argument.

    "lowbias32" (Wellons 2018), in wrapping int32 arithmetic; masks make the shifts logical.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
