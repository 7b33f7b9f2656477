"""Direct preference optimization."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.data.loader import Microbatch
from echelon.objectives.loss import IGNORE
from echelon.objectives.outputs import DecoderOutputs
from echelon.recipe import ObjectiveConfig


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization: of two answers to one prompt the chosen one is made likelier (Rafailov et al.
    2023, arXiv:2305.18290).

    The margin m of a pair is what log p(chosen) - log p(rejected) has grown by since the reference, log-probabilities
    being summed over the answer's tokens. Losses of a pair:

    sigmoid: -(1 - label_smoothing) log sigmoid(beta m) - label_smoothing log sigmoid(-beta m)
    ipo: (m - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036)

    The reward of an answer is beta times what its log-probability has grown by. A pair is two documents of a sequence,
    the chosen one even; it counts if any of its tokens has a label.
    """

    beta: float
    loss: str = "sigmoid"
    label_smoothing: float = 0.0

    needs_reference = True
    unit = "pairs"
    measures = ("reward_accuracy", "reward_margin")

    def count(self, batch: Microbatch) -> Tensor:
        """Pairs with a label."""
        return _labelled_pairs(batch).sum()

    def token_weights(self, batch: Microbatch) -> Tensor:
        """A pair's labelled tokens have equal parts of it."""
        labelled = (batch.labels != IGNORE).float()
        of_document = _sum_by_document(labelled, batch)
        of_pair = of_document[:, 0::2] + of_document[:, 1::2]
        assert batch.documents is not None
        return labelled / of_pair.gather(1, batch.documents.clamp(min=0) // 2).clamp(min=1)

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Summed loss of the pairs."""
        return self._sum_losses(self._margins(outputs, batch), _labelled_pairs(batch))

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed loss; how many chosen answers have the larger reward; by how much, summed."""
        margins, counts = self._margins(outputs, batch), _labelled_pairs(batch)
        right, rewards = (margins > 0) & counts, self.beta * margins * counts
        return torch.stack([self._sum_losses(margins, counts), right.sum().float(), rewards.sum()])

    def _margins(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The margin of each pair: [batch, pairs], fp32."""
        reference = outputs.reference_log_probabilities(batch.labels)
        growth = _sum_by_document(outputs.log_probabilities(batch.labels) - reference, batch)
        return growth[:, 0::2] - growth[:, 1::2]

    def _sum_losses(self, margins: Tensor, counts: Tensor) -> Tensor:
        if self.loss == "ipo":
            losses = (margins - 1 / (2 * self.beta)) ** 2
        else:
            scaled, wrong = self.beta * margins, self.label_smoothing
            losses = -(1 - wrong) * F.logsigmoid(scaled) - wrong * F.logsigmoid(-scaled)
        return (losses * counts).sum()


def _labelled_pairs(batch: Microbatch) -> Tensor:
    """Which pairs there are: boolean [batch, pairs], room for as many as a sequence could hold."""
    labels = _sum_by_document((batch.labels != IGNORE).float(), batch)
    return labels[:, 0::2] + labels[:, 1::2] > 0


def _sum_by_document(values: Tensor, batch: Microbatch) -> Tensor:
    """Sums over each document of a sequence: [batch, seq] to [batch, documents], an even number, as many as may be.

    How many there are only the device knows. Padding has no labels, so its zeros may go to any document.
    """
    assert batch.documents is not None, "pairs are documents"
    num_rows, length = values.shape
    width = length + length % 2
    rows = torch.arange(num_rows, device=values.device)[:, None] * width
    places = rows + batch.documents.clamp(min=0)
    return values.new_zeros(num_rows * width).index_add(0, places.flatten(), values.flatten()).view(num_rows, width)


def build_dpo(config: ObjectiveConfig) -> DPO:
    """The objective of the recipe's section."""
    return DPO(config.beta, config.loss, config.label_smoothing)
