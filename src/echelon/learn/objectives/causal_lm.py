"""Next-token prediction."""

from torch import Tensor
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import DecoderOutputs
from echelon.recipe.objective import ObjectiveConfig


class CausalLM(Objective):
    """Next-token prediction: the cross-entropy of every labelled token."""

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed cross-entropy of the labelled tokens."""
        return outputs.token_loss_sum(batch.labels)


def build_causal_lm(config: ObjectiveConfig) -> CausalLM:
    """Build the objective from the recipe's section."""
    return CausalLM()
