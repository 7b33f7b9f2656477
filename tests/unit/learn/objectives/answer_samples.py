"""Answers to prompts with their advantages and log-probabilities, as a microbatch."""

import numpy as np
import torch

from echelon.learn.data.loader import Microbatch

IGNORE = -100
PROMPT = 3
LENGTHS = (5, 9, 2, 7)
ADVANTAGES = torch.tensor([0.7, -1.2, 1.5, -0.4])


def answers_batch():
    """Four answers after prompts of three tokens, and a sequence that only fills the batch; padding at the end."""
    generator = torch.Generator().manual_seed(3)
    width = PROMPT + max(LENGTHS)
    tokens = torch.zeros(len(LENGTHS) + 1, width, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    old, sampled = torch.zeros(2, *tokens.shape)
    for row, length in enumerate(LENGTHS):
        text = torch.randint(1, 256, (PROMPT + length,), generator=generator)
        tokens[row, : len(text)] = text
        span = slice(PROMPT - 1, PROMPT + length - 1)
        labels[row, span] = text[PROMPT:]
        # About as likely as under the model, so that some ratios are clipped and some are not.
        old[row, span] = -5.5 + 0.4 * torch.randn(length, generator=generator)
        sampled[row, span] = old[row, span] + 0.6 * torch.randn(length, generator=generator)
    ids = np.arange(len(tokens))
    extra = {
        "advantages": torch.cat([ADVANTAGES, torch.zeros(1)]),
        "old_log_probabilities": old,
        "sampled_log_probabilities": sampled,
    }
    return Microbatch(tokens, labels, ids, ids, extra=extra)
