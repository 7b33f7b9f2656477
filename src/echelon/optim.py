"""Optimizers, their parameter groups, and learning-rate schedules as pure functions of the step."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.recipe import OptimConfig

Schedule = Callable[[int], float]


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


def build_schedule(config: OptimConfig, num_steps: int) -> Schedule:
    """The learning rate of each step, counted from 0: linear warm-up, then a cosine down to the stated fraction.

    Step s of the warm-up takes (s + 1) / warmup_steps of the peak, so that the first step already learns; the last
    step takes exactly min_learning_rate_fraction of it (Loshchilov & Hutter 2017).
    """
    peak, warmup, floor = config.learning_rate, config.warmup_steps, config.min_learning_rate_fraction

    def learning_rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, num_steps - 1 - warmup)
        return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))

    return learning_rate


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients, whole on every rank's device. Collective where gradients are sharded."""
    norm = torch.nn.utils.get_total_norm(gradients)
    if not isinstance(norm, DTensor):
        return norm
    if norm.device.type != norm.device_mesh.device_type:
        # Offloaded gradients are on the host; the ranks can add up on the mesh's devices alone, where this puts it.
        norm = DTensor.from_local(norm.to_local(), norm.device_mesh, norm.placements, run_check=False)
    return norm.full_tensor()
