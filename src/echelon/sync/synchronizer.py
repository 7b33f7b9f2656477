"""How replicas agree: the seam for local SGD, parameter servers and quorums. The default agrees at every step."""

from typing import Any, Protocol

from torch import Tensor


class Synchronizer(Protocol):
    """What happens around a step so that replicas stay, or become, one model. Every method is called by every rank."""

    def begin_step(self, step: int) -> None:
        """Called before the forward pass."""
        ...

    def should_commit(self, grad_norm: Tensor) -> Tensor:
        """Whether to apply this step: a boolean scalar on the device that every rank agrees on."""
        ...

    def end_step(self, step: int) -> None:
        """Called after the optimizer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        ...
