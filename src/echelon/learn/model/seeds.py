"""Seeds, and random bits made of counters, that are the same on every rank, machine and device."""

import hashlib

import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """Derive a 63-bit seed from any printable parts, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a forward pass on a device uses: the CPU's, and the current GPU's if it runs there.

    `torch.manual_seed` also seeds every other kind of device. For those that do not exist it keeps the call and a
    formatted stack trace for later, which takes longer than the rest of a small step's bookkeeping.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def mix_bits(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the result depends on every bit of the argument.

    "lowbias32" (Wellons 2018), in wrapping int32 arithmetic; masks make the shifts logical.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
