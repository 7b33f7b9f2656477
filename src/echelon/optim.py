"""Optimizers and their parameter groups."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.recipe import OptimConfig


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and vectors (norms, biases), which do not.

    Embeddings are matrices and decay, as in GPT-2 and GPT-3 (Brown et al. 2020, appendix B).
    """
    parameters = [parameter for _, parameter in named if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019), fused. Sharded parameters get sharded state."""
    return torch.optim.AdamW(
        parameter_groups(named, config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients, whole on every rank's device. Collective where gradients are sharded."""
    norm = torch.nn.utils.get_total_norm(gradients)
    if not isinstance(norm, DTensor):
        return norm
    if norm.device.type != norm.device_mesh.device_type:
        # Offloaded gradients are on the host; the ranks can add up on the mesh's devices alone, where this puts it.
        norm = DTensor.from_local(norm.to_local(), norm.device_mesh, norm.placements, run_check=False)
    return norm.full_tensor()
