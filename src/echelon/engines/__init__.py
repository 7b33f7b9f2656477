"""The Engine: what the trainer drives. It never calls backward, clips or steps an optimizer itself."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from echelon.data.loader import Microbatch


class Evaluation(Protocol):
    """Forward passes without gradients or dropout. Every method is collective."""

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """Summed loss of a held-out microbatch."""
        ...

    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Logits [batch, vocabulary] in fp32 of the token after position `places` [batch] of ids [batch, seq]."""
        ...


class Engine(Protocol):
    """Runs steps of one model under one plan. Every method is collective."""

    def forward_backward(self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor) -> Tensor:
        """Leave gradients of sum(loss) / num_targets; return this rank's summed loss, an fp64 scalar on the device."""
        ...

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale gradients to at most `max_norm` (None: only measure); return the global norm before clipping."""
        ...

    def step(self, learning_rate: float, commit: Tensor) -> None:
        """Apply the gradients where `commit` (a boolean scalar on the device) is true, and drop them in any case."""
        ...

    @property
    def loss_scale(self) -> Tensor | None:
        """The factor on the loss that the next step will use, a live scalar on the device; None where there is none."""
        ...

    def evaluation(self) -> AbstractContextManager["Evaluation"]:
        """Scope of forward passes without gradients or dropout; weights that are gathered stay so within it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Every tensor a checkpoint holds, live, under names that no plan changes."""
        ...
