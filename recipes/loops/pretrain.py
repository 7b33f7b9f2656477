"""Pretraining in a loop of your own.

    echelon train recipes/loops/pretrain.yaml --nproc 2

This file says what a step is: the loss, the gradient, the learning rate, the update. echelon does the rest. It starts
the processes and restarts them, shards the model, feeds the batches, evaluates, saves and resumes, and writes the
metrics and the report.
"""

import torch.nn.functional as F

IGNORE = -100  # the label of a position without a target
Z_WEIGHT = 1e-4  # of the z-loss
MAX_NORM = 1.0  # of the gradient
DECAY = 0.2  # the last part of the run, in which the learning rate falls to 0


def loss(logits, labels, extra):
    """Cross-entropy, and the z-loss that keeps logits from drifting away (PaLM, arXiv:2204.02311).

    logits [n, vocabulary] and labels [n] are a chunk of the tokens of a batch. It returns the sum over them: the
    learner adds up the chunks of all ranks, and divides once by the number of all targets.
    """
    log_z = logits.logsumexp(-1)[labels != IGNORE]
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") + Z_WEIGHT * log_z.square().sum()


def find_learning_rate(step, run):
    """The recipe's warm-up and peak, then a linear decay to 0 (arXiv:2405.18392)."""
    fraction_left = (run.num_steps - step) / run.num_steps
    return run.learning_rate(step) * min(1.0, fraction_left / DECAY)


def pretrain(learner, run):
    """The loop. Every rank runs it, with its own part of each batch."""
    for step in run.steps():
        batch = run.batch(step)

        # Forward and backward passes of all microbatches, then one update.
        sums = learner.forward_backward(batch, loss)
        grad_norm = learner.clip(MAX_NORM)
        learning_rate = find_learning_rate(step, run)
        learner.step(learning_rate)

        # A row of metrics.jsonl, with a key of our own. Nothing here waits for the GPU.
        run.record(step, sums, grad_norm, learning_rate=learning_rate, targets=sums.num_targets)

        # As the recipe says: train.eval_every, checkpoint.every.
        run.evaluate_if_due(step)
        run.save_if_due(step)
