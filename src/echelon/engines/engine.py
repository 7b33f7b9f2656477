"""The Engine: what the trainer drives. It never calls backward, clips or steps an optimizer itself."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from echelon.checkpoint.adapter_folder import AdapterContent
from echelon.data.loader import Microbatch
from echelon.parallel.step import StepSums


@dataclass(frozen=True, order=True)
class Finding:
    """The first thing that was not finite in a microbatch; an earlier one is less than a later one.

    Attributes:
        part: 0 a module's output, 1 the loss, 2 the gradient of a module's output, 3 that of a parameter.
        place: how many of that part came before it.
        name: the module's or the parameter's, as in `transformers`.
    """

    part: Literal[0, 1, 2, 3]
    place: int
    name: str

    def describe(self) -> str:
        """As a noun, for a message."""
        return (
            f"the output of {self.name}",
            f"the loss, while every layer's output is finite (it is made with {self.name})",
            f"the gradient of the output of {self.name}",
            f"the gradient of {self.name}",
        )[self.part]


class Evaluation(Protocol):
    """Forward passes without gradients or dropout. Every method is collective."""

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Summed loss of a held-out microbatch and the objective's measures: see `Objective.evaluation_sums`."""
        ...

    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Logits [batch, vocabulary] in fp32 of the token after position `places` [batch] of ids [batch, seq]."""
        ...


class Engine(Protocol):
    """Runs steps of one model under one plan. Every method is collective."""

    def forward_backward(self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor) -> StepSums:
        """Leave gradients of sum(loss) / num_targets, that of the router included; return this rank's sums."""
        ...

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale gradients to at most `max_norm` (None: only measure); return the global norm before clipping."""
        ...

    def step(self, learning_rate: float, commit: Tensor) -> None:
        """Apply the gradients where `commit` (a boolean scalar on the device) is true, and drop them in any case.

        A loss scale goes by whether the norm was finite, which a step that is not applied for another reason may be.
        """
        ...

    def find_nonfinite(self, step: int, microbatch: Microbatch, num_targets: Tensor) -> Finding | None:
        """Run one microbatch of a step again, watching every layer; apply nothing. What was not finite on this rank."""
        ...

    @property
    def loss_scale(self) -> Tensor | None:
        """The factor on the loss that the next step will use, a live scalar on the device; None where there is none."""
        ...

    def evaluation(self) -> AbstractContextManager["Evaluation"]:
        """Scope of forward passes without gradients or dropout; weights that are gathered stay so within it."""
        ...

    def describe_adapter(self) -> AdapterContent:
        """The adapter that trains, whole, on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Every tensor a checkpoint holds, live, under names that no plan changes."""
        ...
