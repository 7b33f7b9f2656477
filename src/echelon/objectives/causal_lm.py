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
        """Labelled tokens of the microbatch."""
        return (batch.labels != IGNORE).sum()

    def token_weights(self, batch: Microbatch) -> Tensor:
        """1 for a labelled token."""
        return (batch.labels != IGNORE).float()

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Summed cross-entropy of the labelled tokens."""
        return outputs.token_loss_sum(batch.labels)

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed cross-entropy alone."""
        return self.loss_sum(outputs, batch).reshape(1)


def build_causal_lm(config: ObjectiveConfig) -> CausalLM:
    """The objective of the recipe's section."""
    return CausalLM()
