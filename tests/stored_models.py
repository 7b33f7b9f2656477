"""Small checkpoints in each format of quantized weights, and the weights that the format's own code reads from them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

Stored = dict[str, Tensor]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's `order_map`: the column in each place of a word


def quantize_folder(folder: Path, case: str) -> Stored:
    """Write a folder's weights again in a format of `CASES`; return all its weights as the format's code reads them."""
    settings, quantize, is_chosen = CASES[case]
    path = folder / "model.safetensors"
    stored, plain = Stored(), Stored()
    for name, weight in load_file(path).items():
        if not is_chosen(name, weight):
            stored[name] = plain[name] = weight.bfloat16()
            continue
        parts, plain[name] = quantize(name, weight)
        stored |= parts
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def write_plain(folder: Path, out: Path, plain: Stored) -> None:
    """Write a folder like a quantized one, with plain weights."""
    out.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, out / "model.safetensors")


def _is_linear(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and name.endswith("proj.weight")


def _is_expert(name: str, weight: Tensor) -> bool:
    return weight.ndim == 3


def _fp8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    rows, columns = (size // 16 for size in weight.shape)
    blocks = weight.reshape(rows, 16, columns, 16)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, Fp8Dequantize(None)._dequantize_one(
        codes, scales, torch.bfloat16
    )


def _mxfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    experts, columns, rows = weight.shape
    groups = weight.transpose(1, 2).reshape(experts, rows, columns // 32, 32)
    exponents = groups.abs().amax(dim=-1).log2().floor() - 2
    near = (groups / exponents.exp2().unsqueeze(-1)).unsqueeze(-1) - torch.tensor(FP4_VALUES)
    codes = near.abs().argmin(dim=-1).to(torch.uint8)
    blocks, scales = codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def _compressed(layout: str, **weights: Any) -> tuple[dict[str, Any], Any, Any]:
    """A case of compressed-tensors, with its own code both ways."""
    settings = {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip

    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        grid = _grid(weight, args.strategy, args.group_size, args.block_structure)
        largest = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
        state = {"weight": weight, "weight_scale": (grid.abs().amax(dim=(1, 3)) / largest).bfloat16()}
        if not args.symmetric:
            state["weight_zero_point"] = (torch.arange(state["weight_scale"].numel()) % 5 - 2).to(torch.int8)
            state["weight_zero_point"] = state["weight_zero_point"].reshape(state["weight_scale"].shape)
        code = BaseCompressor.get_value_from_registry(layout)
        packed = code.compress(state, scheme)
        base = name.removesuffix("weight")
        return {f"{base}{key}": value for key, value in packed.items()}, code.decompress(packed, scheme)["weight"]

    return settings, quantize, _is_linear


def _grid(weight: Tensor, strategy: str, group_size: int | None, block: list[int] | None) -> Tensor:
    """A weight as `[grid rows, rows, grid columns, columns]`."""
    rows, columns = weight.shape
    sizes = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, group_size), "block": tuple(block or ())}
    height, width = sizes[str(getattr(strategy, "value", strategy))]
    return weight.reshape(rows // height, height, columns // width, width)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Put the codes of each row one after another in words of 32 bits, bit by bit."""
    words = torch.zeros(codes.shape[0], math.ceil(codes.shape[1] * bits / 32), dtype=torch.int64)
    for column in range(codes.shape[1]):
        for bit in range(bits):
            place = column * bits + bit
            words[:, place // 32] |= ((codes[:, column].long() >> bit) & 1) << place % 32
    return words.to(torch.int32)


def _by_output(weight: Tensor, bits: int, of_group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, zero points and fp16 scales per output and group of inputs, and `(code - zero) * scale` one by one."""
    outputs, inputs = weight.shape
    groups = int(of_group.max()) + 1
    scales, zeros = torch.zeros(outputs, groups), torch.zeros(outputs, groups)
    for group in range(groups):
        part = weight[:, of_group == group]
        low, high = part.amin(dim=1), part.amax(dim=1)
        scales[:, group] = (high - low) / (2**bits - 1)
        zeros[:, group] = (-low / scales[:, group]).round().clamp(1, 2**bits - 1)
    scales = scales.half()
    codes = (weight / scales.float()[:, of_group] + zeros[:, of_group]).round().clamp(0, 2**bits - 1)
    plain = torch.empty(outputs, inputs, dtype=torch.float16)
    for column in range(inputs):
        group = of_group[column]
        plain[:, column] = (codes[:, column].half() - zeros[:, group].half()) * scales[:, group]
    return codes, zeros, scales, plain


def _gptq(bits: int, version: str, order: bool = False) -> tuple[dict[str, Any], Any, Any]:
    """GPTQ as AutoGPTQ packs it: `qweight` along inputs, `qzeros` along outputs, less 1 in the first version."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": order, "checkpoint_format": version}

    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        of_group = torch.arange(weight.shape[1]) // 16
        if order:
            of_group = of_group[torch.randperm(len(of_group), generator=torch.Generator().manual_seed(0))]
        codes, zeros, scales, plain = _by_output(weight, bits, of_group)
        base, offset = name.removesuffix("weight"), int(version == "gptq")
        return {
            f"{base}qweight": pack(codes, bits).T,
            f"{base}qzeros": pack(zeros.T - offset, bits),
            f"{base}scales": scales.T,
            f"{base}g_idx": of_group.to(torch.int32),
        }, plain

    return settings, quantize, _is_linear


def _awq(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """AWQ as AutoAWQ's gemm packs it: both along outputs, eight columns of a word in another order."""
    codes, zeros, scales, plain = _by_output(weight, 4, torch.arange(weight.shape[1]) // 16)
    base = name.removesuffix("weight")
    order = torch.tensor([8 * word + place for word in range(weight.shape[0] // 8) for place in AWQ_COLUMNS])
    return {
        f"{base}qweight": pack(codes.T[:, order], 4),
        f"{base}qzeros": pack(zeros.T[:, order], 4),
        f"{base}scales": scales.T,
    }, plain


_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [16, 16]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}

CASES: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], tuple[Stored, Tensor]], Callable[..., bool]]] = {
    "fp8": (_FP8, _fp8, _is_linear),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, _mxfp4, _is_expert),
    "int4-group": _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    "int4-zeros": _compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False),
    "int4-channel": _compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "int3-channel": _compressed("pack-quantized", num_bits=3, type="int", strategy="channel"),
    "int8-channel": _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int8-zeros": _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "fp8-tensor": _compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8-channel": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-block": _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 8]),
    "gptq": _gptq(4, "gptq"),
    "gptq-order": _gptq(4, "gptq_v2", order=True),
    "gptq-3": _gptq(3, "gptq"),
    "gptq-8": _gptq(8, "gptq_v2"),
    "awq": (_AWQ, _awq, _is_linear),
}
"""By name: the `quantization_config`, what quantizes a weight, and which weights it takes."""
