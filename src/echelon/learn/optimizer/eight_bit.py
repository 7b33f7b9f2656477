"""Moments in 8 bits: a code for each number, and a scale for each block of a row.

The dynamic tree code of Dettmers et al. 2022 ("8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861). Blocks
lie within rows, and rows are never cut by sharding, so codes and scales are the same under every plan, and a checkpoint
of them goes on under another bit for bit.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
SMALLEST = 1e-12
_NUM_EXPONENTS = 7


@functools.cache
def code_values(signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, ascending: ever finer towards zero, 0 and 1 among them."""
    values: list[float] = [0.0, 1.0]
    for exponent in range(_NUM_EXPONENTS):
        num_fractions = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1.0, num_fractions + 1)
        fractions = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - _NUM_EXPONENTS + 1)).tolist()
        values += fractions
        if signed:
            values += [-value for value in fractions]
    return tuple(sorted(values))


@functools.cache
def code_table(signed: bool, device: torch.device) -> Tensor:
    """The values on a device, sent there once."""
    return torch.tensor(code_values(signed), device=device)


def num_blocks(width: int) -> int:
    """Blocks of a row of this width; the last may be short."""
    return -(-width // BLOCK)


def pack(values: Tensor, signed: bool, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes (uint8, the shape of `values` [..., width]) and scales (fp32 [..., blocks]) of a tensor.

    `table`: the result of `code_table`, given by code that is compiled, which cannot look it up.

    An unsigned value above 0 is never rounded to 0. AdamW divides by the root of the second moment: with one rounded to
    0, a weight whose next gradient is 0, such as the embedding of a token that the batch lacks, would move by thousands
    of learning rates. The paper keeps the moments of embeddings in 32 bits for this reason.
    """
    table = code_table(signed, values.device) if table is None else table
    count = num_blocks(values.shape[-1])
    padded = F.pad(values, (0, count * BLOCK - values.shape[-1]))
    blocks = padded.reshape(*values.shape[:-1], count, BLOCK)
    scales = blocks.abs().amax(-1).clamp(min=SMALLEST)
    nearest = _count_below(blocks / scales.unsqueeze(-1), (table[:-1] + table[1:]) / 2)
    if not signed:
        nearest = torch.where(blocks > 0, nearest.clamp(min=1), nearest)
    return nearest.to(torch.uint8).flatten(-2)[..., : values.shape[-1]], scales


def unpack(codes: Tensor, scales: Tensor, signed: bool, table: Tensor | None = None) -> Tensor:
    """The fp32 values that codes and scales stand for. `table`: see `pack`."""
    table = code_table(signed, codes.device) if table is None else table
    spread = scales.unsqueeze(-1).expand(*scales.shape, BLOCK).flatten(-2)[..., : codes.shape[-1]]
    return table[codes.int()] * spread


def _count_below(values: Tensor, borders: Tensor) -> Tensor:
    """How many of 255 ascending borders are at most each value.

    A compiler for CPUs cannot put `bucketize` into one pass with what is around it, but a binary search of 8 look-ups.
    """
    if not torch.compiler.is_compiling():
        return torch.bucketize(values, borders, out_int32=True, right=True)
    count = torch.zeros_like(values, dtype=torch.int64)
    for step in (128, 64, 32, 16, 8, 4, 2, 1):
        count = torch.where(borders[count + (step - 1)] <= values, count + step, count)
    return count
