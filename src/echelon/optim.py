"""Learning-rate schedules as pure functions of the step, and the global norm."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon.recipe import OptimConfig

Schedule = Callable[[int], float]


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
