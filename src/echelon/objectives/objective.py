"""The Objective protocol: losses are summed, and divided once by the global number of terms."""

from typing import Protocol

import torch
from torch import Tensor

from echelon.data.loader import Microbatch
from echelon.extensions import build_named
from echelon.objectives.outputs import DecoderOutputs, Reading
from echelon.recipe import ObjectiveConfig
from echelon.recipe.names import OBJECTIVES


class Objective(Protocol):
    """A loss that is a sum over countable terms: target tokens for language modelling, pairs for DPO."""

    @property
    def needs_reference(self) -> bool:
        """Whether it needs a reference model: the weights that training started from."""
        ...

    @property
    def unit(self) -> str:
        """The name of its terms in eval rows: target_tokens, or pairs."""
        ...

    @property
    def measures(self) -> tuple[str, ...]:
        """The metrics that evaluation reports besides the loss: the columns of `evaluation_sums` after the first."""
        ...

    def count(self, batch: Microbatch) -> Tensor:
        """Count the terms of `loss_sum` for this microbatch on this rank: int64 scalar on the batch's device."""
        ...

    def token_weights(self, batch: Microbatch) -> Tensor:
        """Distribute the count over its tokens: weights [batch, seq], fp32, which add up to the count."""
        ...

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, an fp32 scalar, connected to every trained parameter even if the count is zero."""
        ...

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss and the sum of each measure over the same terms: [1 + measures], fp32."""
        ...


def build_objective(config: ObjectiveConfig) -> Objective:
    """Build the objective that the recipe names."""
    made: Objective = build_named("objective.name", config.name, OBJECTIVES, Objective, config, options=config.options)
    return made


def training_sums(objective: Objective) -> Reading:
    """Return the reading of a training step: the summed loss and the summed router loss, [2]."""

    def read(outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        loss = objective.loss_sum(outputs, batch)
        return torch.stack([loss, outputs.router_loss_sum(objective.token_weights(batch))])

    return read
