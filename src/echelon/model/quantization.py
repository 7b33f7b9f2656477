"""Linear layers with 4-bit weights: QLoRA's NF4 or FP4, computed by bitsandbytes.

Dettmers et al. 2023 (arXiv:2305.14314). Both the packed weight and its scales are parameters, so that data parallelism
shards and gathers them like any other. In the layer of bitsandbytes the scales are not a parameter, and stay unsharded
on every rank.
"""

import functools
import logging
import math
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from echelon.model.sharding import local_part, write_part
from echelon.objectives.loss import autocast_dtype
from echelon.recipe import AdapterConfig

BLOCK = 64
"""Number of weights that share one scale."""

ROW_MULTIPLE = 8
"""Divisor of a layer's input features: each packed row then has a whole number of fp32 elements."""

NESTED_BLOCK = 256
"""Number of scales that share one second-level scale, with `double_quant`."""


@functools.cache
def import_bitsandbytes() -> None:
    """Import bitsandbytes, if installed, without the kernels that it would download from the hub at import.

    Must be called before PEFT is imported, which imports bitsandbytes too.
    """
    if find_spec("bitsandbytes") is None:
        return
    absent = object()
    kernels = sys.modules.get("kernels", absent)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, logger.level = logger.level, logging.ERROR
    try:
        import bitsandbytes  # noqa: F401
    finally:
        logger.level = level
        del sys.modules["kernels"]
        if kernels is not absent:
            sys.modules["kernels"] = kernels  # type: ignore[assignment]


class QuantizedLinear(nn.Linear):
    """A frozen 4-bit linear layer. A subclass of `nn.Linear`, so that PEFT adds an adapter to it as to any other.

    `weight` is `[out, in / 2]` bytes with two weights each. `scales` is the bytes of one fp32 scale per block of 64;
    with double quantisation, the bytes of an fp32 offset, one fp32 scale per 256 blocks, and one byte per block. It is
    padded to a multiple of 4 bytes. `store_as` sets the dtype under which both are stored.
    """

    def __init__(self, linear: nn.Linear, quant_type: str, double_quant: bool) -> None:
        """Create the layer on meta, from a linear layer on meta with a multiple of `ROW_MULTIPLE` input features."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        assert self.in_features % ROW_MULTIPLE == 0, f"rows of {self.in_features} numbers"
        self.quant_type = quant_type
        self._num_blocks = math.ceil(self.in_features * self.out_features / BLOCK)
        self._num_nested = math.ceil(self._num_blocks / NESTED_BLOCK) if double_quant else 0
        num_bytes = 4 + 4 * self._num_nested + self._num_blocks if double_quant else 4 * self._num_blocks
        packed = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = torch.empty(-(-num_bytes // 4) * 4, dtype=torch.uint8, device="meta")
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.T + bias` in the compute dtype, with the dequantised weight."""
        from bitsandbytes import matmul_4bit

        rows = input.to(autocast_dtype(input))
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return matmul_4bit(rows, self._packed().t(), self._state(rows.dtype), bias=bias)  # type: ignore[no-any-return]

    def store_as(self, dtype: torch.dtype) -> None:
        """Reinterpret the bytes of the parameters as another dtype, on meta.

        Use the compute dtype: data parallelism shards only floating-point parameters in torch 2.11, and casts those
        of another dtype than the compute dtype.
        """
        for parameter in (self.weight, self.scales):
            parameter.data = parameter.data.view(dtype)

    @torch.no_grad()
    def fill(self, whole: Tensor) -> None:
        """Quantise a full weight `[out, in]`, and keep this rank's part. Every rank computes the same values."""
        from bitsandbytes.functional import quantize_4bit

        device = local_part(self.weight).device
        packed, state = quantize_4bit(
            whole.to(device).contiguous(), compress_statistics=self._num_nested > 0, quant_type=self.quant_type
        )
        parts = [state.offset, state.state2.absmax, state.absmax] if self._num_nested else [state.absmax]
        scales = torch.cat([part.reshape(-1).contiguous().view(torch.uint8) for part in parts])
        scales = nn.functional.pad(scales, (0, -len(scales) % 4))
        for parameter, content in ((self.weight, packed.reshape(self.out_features, -1)), (self.scales, scales)):
            write_part(parameter, content.view(parameter.dtype))

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """Return the dequantised weight, `[out, in]`, fp32. The layer must not be sharded."""
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self._packed(), self._state(torch.float32))
        return weight

    def _packed(self) -> Tensor:
        return self.weight.view(torch.uint8).reshape(-1, 1)

    def _state(self, dtype: torch.dtype) -> Any:
        from bitsandbytes.functional import QuantState

        shape = torch.Size((self.out_features, self.in_features))
        code, nested_code = _code_books(self.quant_type, self.weight.device)
        common = {"shape": shape, "code": code, "blocksize": BLOCK, "quant_type": self.quant_type, "dtype": dtype}
        scales = self.scales.view(torch.uint8)
        if not self._num_nested:
            return QuantState(absmax=scales.view(torch.float32), **common)
        first = 4 + 4 * self._num_nested
        nested = QuantState(
            absmax=scales[4:first].view(torch.float32), blocksize=NESTED_BLOCK, code=nested_code,
            dtype=torch.float32,
        )  # fmt: skip
        offset = scales[:4].view(torch.float32)[0]
        return QuantState(absmax=scales[first : first + self._num_blocks], offset=offset, state2=nested, **common)


@functools.cache
def _code_books(quant_type: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 16 values of a 4-bit code, and the 256 values of a quantised scale."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return get_4bit_type(quant_type, device=device), create_dynamic_map().to(device)


def quantize_linears(layers: Iterable[nn.Module], adapter: AdapterConfig) -> None:
    """Replace the linear layers in decoder layers on meta with 4-bit ones, except `modules_to_save`."""
    for layer in layers:
        found = [(name, module) for name, module in layer.named_modules() if type(module) is nn.Linear]
        for name, module in found:
            if name.rpartition(".")[2] in adapter.modules_to_save:
                continue
            layer.set_submodule(name, QuantizedLinear(module, adapter.quant_type, adapter.double_quant))
