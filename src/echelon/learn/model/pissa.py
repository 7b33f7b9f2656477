"""PiSSA: an adapter initialized with the principal components of each frozen weight, which keeps the remainder.

Meng et al. 2024 (arXiv:2404.02948): with W = U S V', A = sqrt(S_r / scale) V_r' and B = U_r sqrt(S_r / scale), and
W - scale B A is frozen. The initial A and B are not stored: they are recomputed from the weights a run starts with.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.learn.model.sharding import whole, write_part

PrincipalParts = dict[str, tuple[Tensor, Tensor]]
"""The initial (A, B) of each adapted layer by its name: full tensors on the CPU."""


@torch.no_grad()
def take_principal_parts(model: nn.Module, frozen_dtype: torch.dtype | None = None) -> PrincipalParts:
    """Set every LoRA layer to its weight's principal part, and the frozen weight to the remainder. Collective.

    Args:
        frozen_dtype: dtype that the weights had when the parts were first computed; None for their current dtype.
    """
    parts = {}
    for name, layer in lora_layers(model):
        weight = layer.get_base_layer().weight
        full = whole(weight)
        a, b = _principal_part(layer, full.to(frozen_dtype or full.dtype))
        for target, content in (
            (layer.lora_A["default"].weight, a),
            (layer.lora_B["default"].weight, b),
            (weight, full.float() - _product(layer, a, b)),
        ):
            write_part(target, content)
        parts[name] = (a.cpu(), b.cpu())
    return parts


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _product(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return what the adapter adds to the weight, in the weight's layout."""
    product: Tensor = layer.scaling["default"] * (b @ a)
    return product.T if layer.fan_in_fan_out else product


def _principal_part(layer: Any, weight: Any) -> tuple[Tensor, Tensor]:
    """Compute (A [r, in], B [out, r]) of a full weight, fp32.

    Broadcast from rank 0, because the signs of an SVD are arbitrary.
    """
    rank, scale = layer.r["default"], layer.scaling["default"]
    oriented = weight.T if layer.fan_in_fan_out else weight
    u, s, v = torch.linalg.svd(oriented.float(), full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    a, b = (root[:, None] * v[:rank]).contiguous(), (u[:, :rank] * root).contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        for part in (a, b):
            dist.broadcast(part, src=0)
    return a, b
