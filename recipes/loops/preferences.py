"""Direct preference optimization from log-probabilities (DPO, Rafailov et al. 2023, arXiv:2305.18290).

    echelon train recipes/loops/preferences.yaml

A pair is a prompt with a chosen and a rejected answer. With r = log p(answer) - log p_reference(answer), the loss of a
pair is -log sigmoid(BETA * (r_chosen - r_rejected)). Its gradient is that of a weighted sum of log-probabilities, so a
step computes the weights first, and then the gradient of the sum.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F

import echelon

BETA = 0.1
PAIRS = Path("pairs.jsonl")  # lines {"prompt": ..., "chosen": ..., "rejected": ...}


class WeightedAnswers(echelon.Objective):
    """The negative sum of weight * log p(answer) over sequences; there is one chosen answer per pair."""

    unit = "pairs"

    def count(self, batch):
        """The number of pairs, by which the sum over all ranks is divided."""
        return batch.extra["chosen"].sum()

    def loss_sum(self, outputs, batch):
        """The sum over the sequences of a microbatch."""
        return -(batch.extra["weight"] * outputs.log_probabilities(batch.labels).sum(1)).sum()


def encode(tokenizer, prompt, answer, length):
    """The tokens of a prompt and its answer, and their labels: the next token, only in the answer."""
    head = tokenizer.encode(prompt, add_special_tokens=False)
    ids = (head + tokenizer.encode(answer, add_special_tokens=False))[: length + 1]
    return ids[:-1], [-100] * (len(head) - 1) + ids[len(head) :]


def read_batch(learner, pairs, step):
    """This rank's part of the pairs of a step: chosen and rejected answers alternate."""
    count, place = learner.recipe.global_batch_size, learner.place
    share = [(step * count + index) % len(pairs) for index in place.share(count)]
    rows = [
        encode(learner.tokenizer, pairs[index]["prompt"], pairs[index][kind], learner.recipe.data.sequence_len)
        for index in share
        for kind in ("chosen", "rejected")
    ]
    sequences, labels = zip(*rows, strict=True)
    return echelon.build_step_batch(step, sequences, labels, place, {"chosen": [1, 0] * len(share)})


def score(learner, batch):
    """log p(answer) of this rank's answers, [pairs, 2]: chosen and rejected."""
    places = [torch.from_numpy(microbatch.batch_indices) for microbatch in batch.microbatches]
    scores = torch.cat([found.sum(1) for found in learner.log_probabilities(batch)])
    return scores[torch.cat(places).argsort()].view(-1, 2)


def train(learner, run):
    """The loop."""
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    reference = echelon.Learner.build(learner.recipe, learner.plan)  # the model as it was before the first step
    for step in run.steps():
        batch = read_batch(learner, pairs, step)
        rewards = BETA * (score(learner, batch) - score(reference, batch))
        margins = rewards[:, 0] - rewards[:, 1]

        # The derivative of -log sigmoid(margin) with respect to the log-probabilities of both answers.
        weight = BETA * torch.sigmoid(-margins)
        weights = torch.stack([weight, -weight], dim=1).flatten().cpu()
        first = batch.microbatches and min(int(each.batch_indices.min()) for each in batch.microbatches)
        batch = batch.with_extra(weight=[weights[each.batch_indices - first] for each in batch.microbatches])

        sums = learner.forward_backward(batch, WeightedAnswers())
        grad_norm = learner.clip()
        learner.step(run.learning_rate(step))
        run.record(
            step,
            sums,
            grad_norm,
            dpo_loss=-F.logsigmoid(margins).mean(),
            reward_margin=margins.mean(),
            reward_accuracy=(margins > 0).float().mean(),
        )
