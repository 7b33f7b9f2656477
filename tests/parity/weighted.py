"""A source whose batches say how much each token counts, and an objective that obeys it. Sequences differ in length."""

import numpy as np

from echelon.learn.data.loader import NO_LABEL, BatchSource
from echelon.learn.data.own_batches import build_step_batch
from echelon.learn.objectives.causal_lm import CausalLM
from tests.parity.training import SEQUENCE_LEN


class Weighted(BatchSource):
    """Sequence i of a step has 5 to 32 tokens of the text, a weight for each token, and one for the sequence."""

    is_pure = True

    def __init__(self, recipe, data, place):
        self.recipe, self.data, self.place = recipe, data, place

    def batch(self, step):
        num_sequences = self.recipe.batches.sequences(step)
        share = self.place.share(num_sequences)
        numbers = [self.recipe.batches.first_sequence(step) + index for index in share]
        samples = self.data.train.read_samples(np.array(numbers, dtype=np.int64) % self.data.train.num_samples)
        lengths = [5 + number * 7 % (SEQUENCE_LEN - 4) for number in numbers]
        return build_step_batch(
            step,
            [row[:length].tolist() for row, length in zip(samples.inputs, lengths, strict=True)],
            [[NO_LABEL, *row[1:length].tolist()] for row, length in zip(samples.labels, lengths, strict=True)],
            self.place,
            {
                "tokens": [
                    [(number + place) % 3 / 2 for place in range(length)]
                    for number, length in zip(numbers, lengths, strict=True)
                ],
                "sequence": [1.0 + number % 4 for number in numbers],
            },
            num_sequences,
        )

    def close(self):
        pass


class WeightedLoss(CausalLM):
    """Cross-entropy times the weights of the batch."""

    def __init__(self, config):
        pass

    def loss_sum(self, outputs, batch):
        weights = batch.extra.get("tokens", 1) * batch.extra["sequence"][:, None] if batch.extra else 1
        return -(outputs.log_probabilities(batch.labels) * weights).sum()
