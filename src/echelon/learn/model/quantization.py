"""Linear layers with fewer bits: 4-bit weights of linears and experts by bitsandbytes, products in float8 by torchao.

4-bit weights are QLoRA's NF4 or FP4: Dettmers et al. 2023 (arXiv:2305.14314). Both the packed weight and its scales are
parameters, so that data parallelism shards and gathers them like any other. In the layer of bitsandbytes the scales are
not a parameter, and stay unsharded on every rank.

With products in float8, weights stay in the dtype in which they are stored. Inputs, weights and output gradients are
scaled by the largest value of the whole tensor, or of each row, at each use, and cast to e4m3 (gradients of whole
tensors to e5m2); the products accumulate in fp32 (Micikevicius et al. 2022, arXiv:2209.05433). Weights that are scaled
as a whole are gathered in float8: each rank casts its shard.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.ground.extras import require_extra
from echelon.learn.model.parts import autocast_dtype, find_layers
from echelon.learn.model.sharding import local_part, write_part
from echelon.planner.adapter_plan import NESTED_BLOCK, QUANTIZED_BLOCK, ROW_MULTIPLE
from echelon.planner.experts import find_expert_weights, find_recorded_routers
from echelon.recipe.inputs import AdapterConfig
from echelon.recipe.training import Float8Scaling

ERROR_PIECE = 2**22
"""The numbers of a weight whose error is computed at a time."""

IN_4_BITS = "in_4_bits"
"""Last part of the name of 4-bit expert weights, after their name in the plain model."""


class Quantized:
    """A frozen weight in 4 bits, as the parameters `PACKED` and `scales` of a module.

    The first is `[rows, columns / 2]` bytes with two weights each, where a row is the last dim of the weight. `scales`
    is the bytes of one fp32 scale per block of 64; with double quantisation, the bytes of an fp32 offset, one fp32
    scale per 256 blocks, and one byte per block. It is padded to a multiple of 4 bytes. `store_as` sets the dtype under
    which both are stored. The buffers `weight_code` and `scale_code` are the numbers that the codes stand for; each
    layer has its own, because a compiled graph breaks where it would build or look up a tensor.
    """

    PACKED: ClassVar[str]
    scales: nn.Parameter
    weight_code: Tensor
    scale_code: Tensor
    weight_shape: torch.Size
    quant_type: str
    error: float | None = None
    """That of `relative_error` when the weight was filled, if it was measured."""

    @property
    def packed(self) -> nn.Parameter:
        """The packed weight."""
        parameter: nn.Parameter = getattr(self, self.PACKED)
        return parameter

    def _allocate(self, shape: Sequence[int], quant_type: str, double_quant: bool) -> None:
        """Create the parameters on meta, for a weight whose last dim is a multiple of `ROW_MULTIPLE`."""
        assert shape[-1] % ROW_MULTIPLE == 0, f"rows of {shape[-1]} numbers"
        self.weight_shape, self.quant_type = torch.Size(shape), quant_type
        self._num_blocks = math.ceil(math.prod(shape) / QUANTIZED_BLOCK)
        self._num_nested = math.ceil(self._num_blocks / NESTED_BLOCK) if double_quant else 0
        num_bytes = 4 + 4 * self._num_nested + self._num_blocks if double_quant else 4 * self._num_blocks
        packed = torch.empty(math.prod(shape[:-1]), shape[-1] // 2, dtype=torch.uint8, device="meta")
        setattr(self, self.PACKED, nn.Parameter(packed, requires_grad=False))
        scales = torch.empty(-(-num_bytes // 4) * 4, dtype=torch.uint8, device="meta")
        self.scales = nn.Parameter(scales, requires_grad=False)
        assert isinstance(self, nn.Module)
        self.register_buffer("weight_code", torch.empty(16, device="meta"), persistent=False)
        self.register_buffer("scale_code", torch.empty(256, device="meta"), persistent=False)

    def store_as(self, dtype: torch.dtype) -> None:
        """Reinterpret the bytes of the parameters as another dtype, on meta.

        Use the compute dtype: data parallelism shards only floating-point parameters in torch 2.11, and casts those
        of another dtype than the compute dtype.
        """
        for parameter in (self.packed, self.scales):
            parameter.data = parameter.data.view(dtype)

    @torch.no_grad()
    def fill(self, whole: Tensor, measures: bool = False) -> None:
        """Quantise a full weight, and keep this rank's part. Every rank computes the same values.

        With `measures`, set `error`, which needs memory for another copy of the weight.
        """
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        device = local_part(self.packed).device
        packed, state = quantize_4bit(
            whole.to(device).contiguous(), compress_statistics=self._num_nested > 0, quant_type=self.quant_type
        )
        if measures:
            self.error = relative_error(whole.to(device), dequantize_4bit(packed, state))
        parts = [state.offset, state.state2.absmax, state.absmax] if self._num_nested else [state.absmax]
        scales = torch.cat([part.reshape(-1).contiguous().view(torch.uint8) for part in parts])
        scales = nn.functional.pad(scales, (0, -len(scales) % 4))
        rows = packed.reshape(math.prod(self.weight_shape[:-1]), -1)
        for parameter, content in ((self.packed, rows), (self.scales, scales)):
            write_part(parameter, content.view(parameter.dtype))
        code_device = device if self.weight_code.is_meta else self.weight_code.device
        self.weight_code = state.code.to(code_device)
        if self._num_nested:
            self.scale_code = state.state2.code.to(code_device)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised weight. Its parameters must not be sharded."""
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self._bytes(), self._state(dtype))
        return weight

    def _bytes(self) -> Tensor:
        return self.packed.view(torch.uint8).reshape(-1, 1)

    def _state(self, dtype: torch.dtype) -> Any:
        from bitsandbytes.functional import QuantState

        common = {
            "shape": self.weight_shape,
            "code": self.weight_code,
            "blocksize": QUANTIZED_BLOCK,
            "quant_type": self.quant_type,
        }
        scales = self.scales.view(torch.uint8)
        if not self._num_nested:
            return QuantState(absmax=scales.view(torch.float32), dtype=dtype, **common)
        first = 4 + 4 * self._num_nested
        nested = QuantState(
            absmax=scales[4:first].view(torch.float32), blocksize=NESTED_BLOCK, code=self.scale_code,
            dtype=torch.float32,
        )  # fmt: skip
        absmax, offset = scales[first : first + self._num_blocks], scales[:4].view(torch.float32)[0]
        return QuantState(absmax=absmax, offset=offset, state2=nested, dtype=dtype, **common)


def relative_error(weight: Tensor, other: Tensor) -> float:
    """Return the Frobenius norm of the difference of two weights `[rows, ...]` over that of the first."""
    step = max(1, ERROR_PIECE // max(1, math.prod(weight.shape[1:])))
    difference, length = torch.zeros(2, dtype=torch.float64, device=weight.device).unbind()
    for exact, near in zip(torch.split(weight, step), torch.split(other, step), strict=True):
        difference += (exact.float() - near.float()).square().sum(dtype=torch.float64)
        length += exact.float().square().sum(dtype=torch.float64)
    return math.sqrt(float(difference / length)) if length > 0 else 0.0


def describe_errors(model: nn.Module) -> str | None:
    """Return a line about the measured errors of a model's 4-bit weights; None if none was measured."""
    errors = {
        name: module.error
        for name, module in model.named_modules()
        if isinstance(module, Quantized) and module.error is not None
    }
    if not errors:
        return None
    worst = max(errors, key=lambda name: errors[name])
    return (
        f"adapter: the checkpoint stores its weights quantized, and they were quantized again to 4 bits; the relative "
        f"error that this adds to a weight is {statistics.median(errors.values()):.3g} in the median of {len(errors)} "
        f"and {errors[worst]:.3g} at most, in {worst.replace('base_model.model.', '').replace('.base_layer', '')}"
    )


class QuantizedLinear(Quantized, nn.Linear):
    """A frozen 4-bit linear layer. A subclass of `nn.Linear`, so that PEFT adds an adapter to it as to any other."""

    PACKED = "weight"

    def __init__(self, linear: nn.Linear, quant_type: str, double_quant: bool) -> None:
        """Create the layer on meta, from a linear layer on meta with a multiple of `ROW_MULTIPLE` input features."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._allocate((self.out_features, self.in_features), quant_type, double_quant)
        self.bias = linear.bias

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.T + bias` in the compute dtype, with the dequantised weight."""
        from bitsandbytes import matmul_4bit

        rows = input.to(autocast_dtype(input))
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return matmul_4bit(rows, self._bytes().t(), self._state(rows.dtype), bias=bias)  # type: ignore[no-any-return]


class QuantizedExperts(Quantized, nn.Module):
    """Frozen 4-bit weights of experts. It stands where their parameter did, as a submodule of the same name.

    During the forward pass of the experts, an attribute of that name is the dequantised weight.
    """

    PACKED = IN_4_BITS

    def __init__(self, shape: Sequence[int], quant_type: str, double_quant: bool) -> None:
        """Create the parameters on meta."""
        nn.Module.__init__(self)
        self._allocate(shape, quant_type, double_quant)


def _show_weights(experts: nn.Module, inputs: tuple[Any, ...]) -> None:
    for name, module in experts.named_children():
        if isinstance(module, QuantizedExperts):
            experts.__dict__[name] = module.dequantize(autocast_dtype(inputs[0]))  # found before the submodule


def _hide_weights(experts: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    for name, module in experts.named_children():
        if isinstance(module, QuantizedExperts):
            experts.__dict__.pop(name, None)


def quantize_linears(layers: Iterable[nn.Module], adapter: AdapterConfig) -> None:
    """Replace the linear layers in decoder layers on meta with 4-bit ones, except `modules_to_save`."""
    for layer in layers:
        for name, module in list(layer.named_modules()):
            if type(module) is nn.Linear and name.rpartition(".")[2] not in adapter.modules_to_save:
                layer.set_submodule(name, QuantizedLinear(module, adapter.quant_type, adapter.double_quant))


def quantize_experts(model: nn.Module, layers: Iterable[nn.Module], adapter: AdapterConfig) -> None:
    """Replace the expert weights in decoder layers of a model on meta with 4-bit ones."""
    for layer in layers:
        owners: dict[int, nn.Module] = {}
        for name, weight in find_expert_weights(model, layer).items():
            path, _, leaf = name.rpartition(".")
            experts = layer.get_submodule(path)
            delattr(experts, leaf)
            experts.add_module(leaf, QuantizedExperts(weight.shape, adapter.quant_type, adapter.double_quant))
            owners[id(experts)] = experts
        for experts in owners.values():
            experts.register_forward_pre_hook(_show_weights)
            experts.register_forward_hook(_hide_weights, always_call=True)


_MULTIPLE = 16  # the kernels of products in float8 take tiles of this many rows and columns


def check_float8_package() -> None:
    """Raise ConfigError if torchao is not installed."""
    require_extra("train.precision=fp8", "float8", "or use train.precision=bf16")


def find_float8_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that compute in float8, by name: those of the decoder layers whose sizes the kernels support.

    Routers of experts are left out, because small differences in their output choose other experts. The head is left
    out, because the loss is most sensitive to its rounding.

    Raises:
        ConfigError: there are none.
    """
    inside = {id(module) for layer in find_layers(model) for module in layer.modules()}
    inside -= {id(module) for router, _ in find_recorded_routers(model).values() for module in router.modules()}
    linear = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and id(module) in inside
    }
    fitting = {
        name: module
        for name, module in linear.items()
        if module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
    }
    if not fitting:
        raise ConfigError(
            f"train.precision=fp8: the decoder layers of {type(model).__name__} have no linear layer whose sizes are "
            f"multiples of {_MULTIPLE}; use train.precision=bf16."
        )
    return fitting


def apply_float8(model: nn.Module, emulate: bool, scaling: Float8Scaling = "tensorwise", gathers: bool = False) -> None:
    """Replace linear layers of a model, on meta or not, in place; parameters and their names stay.

    Args:
        emulate: compute the products of the rounded values in the compute dtype, which runs on every device.
        gathers: the weights are sharded by FSDP, which is to gather them in float8; for tensorwise scales.

    Raises:
        ConfigError: no layer can compute in float8, or torchao is not installed.
    """
    check_float8_package()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = find_float8_layers(model)
    options: dict[str, Any] = {"emulate": emulate, "enable_fsdp_float8_all_gather": gathers}
    config = replace(Float8LinearConfig.from_recipe_name(scaling), **options)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def share_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8, from their shards. Collective.

    Without it each layer finds its own while it is gathered, by a collective of its own. To be called after each change
    of the weights.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
