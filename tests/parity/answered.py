"""A source of answers to prompts, and GRPO on them as a recipe names it, without a model that draws the answers."""

import numpy as np

from echelon.learn.data.loader import NO_LABEL
from echelon.learn.data.own_batches import build_step_batch
from echelon.learn.objectives.grpo import GRPO
from tests.parity.training import SEQUENCE_LEN
from tests.parity.weighted import Weighted

_PROMPT = 3


class Answers(Weighted):
    """Sequence i of a step is a prompt of three tokens and an answer of 2 to 29, with an advantage that is its own.

    The log-probabilities before the update are about those of a model that knows nothing, so that some ratios are
    clipped and some are not.
    """

    def batch(self, step):
        count = self.recipe.batches.sequences(step)
        numbers = [self.recipe.batches.first_sequence(step) + index for index in self.place.share(count)]
        samples = self.data.train.read_samples(np.array(numbers, dtype=np.int64) % self.data.train.num_samples)
        lengths = [_PROMPT + 2 + number * 7 % (SEQUENCE_LEN - _PROMPT - 2) for number in numbers]
        texts = [row[:length].tolist() for row, length in zip(samples.inputs, lengths, strict=True)]
        old = [-5.5 + 0.4 * np.random.default_rng(number).standard_normal(SEQUENCE_LEN) for number in numbers]
        return build_step_batch(
            step,
            texts,
            [[NO_LABEL] * _PROMPT + text[_PROMPT:] for text in texts],
            self.place,
            {
                "advantages": [(number * 5 % 7 - 3) / 2 for number in numbers],
                "old_log_probabilities": [row[:length].tolist() for row, length in zip(old, lengths, strict=True)],
                "sampled_log_probabilities": [
                    (1.02 * row[:length]).tolist() for row, length in zip(old, lengths, strict=True)
                ],
            },
            count,
        )


class AnsweredGRPO(GRPO):
    """GRPO with the settings in `objective.options`."""

    def __init__(self, config, **options):
        super().__init__(**options)
