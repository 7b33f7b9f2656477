"""What a run minimises: losses are summed here and divided once, by the global number of what they are summed over."""

from typing import Protocol

import torch
from torch import Tensor

from echelon.data.loader import Microbatch
from echelon.extensions import build_named
from echelon.objectives.outputs import DecoderOutputs, Reading
from echelon.recipe import ObjectiveConfig
from echelon.recipe.names import OBJECTIVES


class Objective(Protocol):
    """A loss that is a sum over countable things: target tokens for language modelling, pairs for DPO."""

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with the weights that training started from."""
        ...

    @property
    def unit(self) -> str:
        """What is counted, as eval rows name it: target_tokens, or pairs."""
        ...

    @property
    def measures(self) -> tuple[str, ...]:
        """What evaluation reports beside the loss: the columns of `evaluation_sums` after the first."""
        ...

    def count(self, batch: Microbatch) -> Tensor:
        """How many terms `loss_sum` adds up for this microbatch on this rank: int64 scalar on the batch's device."""
        ...

    def token_weights(self, batch: Microbatch) -> Tensor:
        """The count shared out over the tokens that it is of: [batch, seq], fp32, which add up to the count."""
        ...

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed loss, fp32 scalar, connected to every trained parameter even when the count is zero."""
        ...

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed loss and the sum of each measure over the same terms: [1 + measures], fp32."""
        ...


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that the recipe names."""
    made: Objective = build_named("objective.name", config.name, OBJECTIVES, Objective, config, options=config.options)
    return made


def training_sums(objective: Objective) -> Reading:
    """What a training step takes from a forward pass: [2], the summed loss and the summed router loss."""

    def read(outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        loss = objective.loss_sum(outputs, batch)
        return torch.stack([loss, outputs.router_loss_sum(objective.token_weights(batch))])

    return read
