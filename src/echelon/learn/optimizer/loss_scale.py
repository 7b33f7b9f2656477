"""Dynamic loss scaling, for gradients that fp16 would flush to zero."""

from collections.abc import Iterable

import torch
from torch import Tensor

INITIAL = 65536.0
GROWTH_STEPS = 2000


class LossScale:
    """The factor on the loss of an fp16 run, and how it changes, without the host.

    It doubles after GROWTH_STEPS good steps in a row, and is halved by each step whose gradients overflowed
    (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2), as in `torch.amp.GradScaler`, of which these
    are the defaults.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.empty((), device=device)
        self._good_steps = torch.empty((), device=device)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.value.fill_(INITIAL)
        self._good_steps.zero_()

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Take the factor out of gradients, in place; those that overflowed stay infinite, or become NaN.

        The gradients are on one device. With offloaded parameters it is the CPU, while the loss is on the GPU.
        """
        scaled = list(gradients)
        if scaled:
            torch._foreach_mul_(scaled, self.value.reciprocal().to(scaled[0].device))

    def update(self, is_finite: Tensor) -> None:
        """Book one step: whether its gradients were finite, on every rank the same."""
        is_finite = is_finite.to(self.value.device)
        good = torch.where(is_finite, self._good_steps + 1, 0.0)
        grows = good >= GROWTH_STEPS
        self.value.mul_(torch.where(is_finite, torch.where(grows, 2.0, 1.0), 0.5))
        self._good_steps.copy_(torch.where(grows, 0.0, good))

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors of a checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps}
