"""The Engine: what the trainer drives. It never calls backward, clips or steps an optimizer itself."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from echelon.checkpoint.adapter_folder import AdapterContent
from echelon.data.loader import Microbatch
from echelon.parallel.step import StepSums
from echelon.sync.synchronizer import Fill, Replica


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


class Engine(Replica, Protocol):
    """Runs steps of one model under one plan. Every method is collective.

    Besides those here it has the methods of `Replica`: weights, gradients and step. A loss scale goes by whether the
    norm was finite, which a step that is not applied for another reason may be.
    """

    def describe(self) -> Sequence[str]:
        """Lines for the user about how the model is trained, as a run starts."""
        ...

    def rehearse(self, microbatch: Microbatch, num_microbatches: int) -> None:
        """Run one whole step on a microbatch, as often as a step has microbatches, without its targets; apply nothing.

        Called once, before the first step: buffers get the same layout in a fresh start and in a resumed one, and a
        lack of memory shows here. An engine that runs microbatches one after the other may run a single one.
        """
        ...

    def forward_backward(self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor) -> StepSums:
        """Leave gradients of sum(loss) / num_targets, that of the router included; return this rank's sums."""
        ...

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale gradients to at most `max_norm` (None: only measure); return the global norm before clipping."""
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

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint holds, under names that no plan changes: live ones, or made for the save."""
        ...

    def load(self, fill: Fill) -> None:
        """Have tensors named and shaped like those of `state_dict` filled, and go on with what is in them."""
        ...
