"""The synchronizer that agrees at every step: replicas are one model throughout."""

from typing import Any

import torch
from torch import Tensor


class EveryStep:
    """Gradients are reduced over all ranks at every step; a step commits when the global norm is finite."""

    def begin_step(self, step: int) -> None:
        """Nothing to prepare."""

    def should_commit(self, grad_norm: Tensor) -> Tensor:
        """Finite on one rank is finite on all: the norm is already the global one."""
        return torch.isfinite(grad_norm)

    def end_step(self, step: int) -> None:
        """Nothing to settle."""

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""
