"""Direct preference optimization."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import DecoderOutputs
from echelon.recipe import ObjectiveConfig


@dataclass(frozen=True)
class DPO(Objective):
    """Direct preference optimization, on pairs of a chosen and a rejected answer (Rafailov et al. 2023,
    arXiv:2305.18290).

    The margin m of a pair is log p(chosen) - log p(rejected) of the model minus that of the reference, where
    log-probabilities are summed over the answer's tokens. Losses of a pair:

    sigmoid: -(1 - label_smoothing) log sigmoid(beta m) - label_smoothing log sigmoid(-beta m)
    ipo: (m - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036)

    The reward of an answer is beta times the difference between its log-probability and the reference's. A pair is two
    consecutive documents of a sequence, of which the chosen one has an even index; it counts if any of its tokens has a
    label.
    """

    beta: float
    loss: str = "sigmoid"
    label_smoothing: float = 0.0

    needs_reference = True
    unit = "pairs"
    measures = ("reward_accuracy", "reward_margin")

    @override
    def count(self, batch: Microbatch) -> Tensor:
        """Count the pairs with a label."""
        return _labelled_pairs(batch).sum()

    @override
    def token_weights(self, batch: Microbatch) -> Tensor:
        """Return equal weights for the labelled tokens of a pair, which add up to 1 per pair."""
        labelled = (batch.labels != IGNORE).float()
        of_document = _sum_by_document(labelled, batch)
        of_pair = of_document[:, 0::2] + of_document[:, 1::2]
        assert batch.documents is not None
        return labelled / of_pair.gather(1, batch.documents.clamp(min=0) // 2).clamp(min=1)

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss of the pairs."""
        return self._sum_losses(self._margins(outputs, batch), _labelled_pairs(batch))

    @override
    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, the number of chosen answers with the larger reward, and the summed reward margin."""
        margins, counts = self._margins(outputs, batch), _labelled_pairs(batch)
        right, rewards = (margins > 0) & counts, self.beta * margins * counts
        return torch.stack([self._sum_losses(margins, counts), right.sum().float(), rewards.sum()])

    def _margins(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Compute the margin of each pair: [batch, pairs], fp32."""
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
    """Return which pairs exist: boolean [batch, pairs], with space for the most pairs that a sequence can have."""
    labels = _sum_by_document((batch.labels != IGNORE).float(), batch)
    return labels[:, 0::2] + labels[:, 1::2] > 0


def _sum_by_document(values: Tensor, batch: Microbatch) -> Tensor:
    """Sum values over each document of a sequence: [batch, seq] to [batch, documents].

    The result has space for the largest possible (even) number of documents: the actual number is only known on the
    device. Padding has no labels, so its zeros may be added to any document.
    """
    assert batch.documents is not None, "pairs are documents"
    num_rows, length = values.shape
    width = length + length % 2
    rows = torch.arange(num_rows, device=values.device)[:, None] * width
    places = rows + batch.documents.clamp(min=0)
    return values.new_zeros(num_rows * width).index_add(0, places.flatten(), values.flatten()).view(num_rows, width)


def build_dpo(config: ObjectiveConfig) -> DPO:
    """Build the objective from the recipe's section."""
    return DPO(config.beta, config.loss, config.label_smoothing)
