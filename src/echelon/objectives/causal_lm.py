"""Next-token prediction."""

from torch import Tensor

from echelon.data.loader import Microbatch
from echelon.objectives.loss import IGNORE
from echelon.objectives.outputs import DecoderOutputs
from echelon.recipe import ObjectiveConfig


class CausalLM:
    """Next-token prediction: the cross-entropy of every labelled token."""

    needs_reference = False
    unit = "target_tokens"
    measures: tuple[str, ...] = ()

    def count(self, batch: Microbatch) -> Tensor:
        """Count the labelled tokens of the microbatch."""
        return (batch.labels != IGNORE).sum()

    def token_weights(self, batch: Microbatch) -> Tensor:
        """Return 1 for a labelled token, else 0."""
        return (batch.labels != IGNORE).float()

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed cross-entropy of the labelled tokens."""
        return outputs.token_loss_sum(batch.labels)

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed cross-entropy, [1]."""
        return self.loss_sum(outputs, batch).reshape(1)


def build_causal_lm(config: ObjectiveConfig) -> CausalLM:
    """Build the objective from the recipe's section."""
    return CausalLM()
