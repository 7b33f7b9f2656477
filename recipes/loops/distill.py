"""Distillation: a small model learns from the predictions of a larger one, which every process has in memory.

    echelon train recipes/loops/distill.yaml

The teacher's likeliest tokens of each position travel with the batch, so the loss is a function of a chunk of tokens,
like any other (Hinton et al. 2015, arXiv:1503.02531).
"""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

TEACHER = "teacher"  # a model folder or hub id with the same tokenizer, such as `echelon export RUN teacher` writes
TOP = 16  # tokens of the teacher for each position
TEMPERATURE = 2.0
ALPHA = 0.7  # the weight of the teacher; the rest is that of the text


def loss(logits, labels, extra):
    """ALPHA * KL(teacher || student) + (1 - ALPHA) * cross-entropy, summed over a chunk of tokens.

    logits [n, vocabulary], labels [n], extra: the teacher's `tokens` and `scores` [n, TOP].
    """
    has_label = labels != -100
    student = (logits / TEMPERATURE).log_softmax(-1).gather(1, extra["tokens"])
    teacher = (extra["scores"] / TEMPERATURE).log_softmax(-1)  # over its likeliest tokens alone
    divergence = (teacher.exp() * (teacher - student)).sum(-1)[has_label].sum()
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return ALPHA * TEMPERATURE**2 * divergence + (1 - ALPHA) * cross_entropy


@torch.no_grad()
def ask(teacher, batch):
    """The batch with the teacher's likeliest tokens and their scores, [batch, seq, TOP]."""
    found = [teacher(microbatch.input_ids).logits.float().topk(TOP) for microbatch in batch.microbatches]
    return batch.with_extra(tokens=[top.indices for top in found], scores=[top.values for top in found])


def distill(learner, run):
    """The loop."""
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER).to(learner.device).eval()
    for step in run.steps():
        batch = ask(teacher, run.batch(step).to(learner.device))
        sums = learner.forward_backward(batch, loss)
        grad_norm = learner.clip()
        learner.step(run.learning_rate(step))
        run.record(step, sums, grad_norm)
        run.evaluate_if_due(step)  # the objective of the recipe: cross-entropy
        run.save_if_due(step)
