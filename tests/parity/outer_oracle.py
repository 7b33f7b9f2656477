"""Local SGD and DiLoCo as two loops in plain torch: all replicas in one process, one after the other."""

import copy

import torch
from torch.nn.functional import cross_entropy

from tests.parity.training import masked_trainer


def train_outer_oracle(rank, world_size, path, plan, replicas, every, outer_rate, momentum, overlap=False, bad=None):
    """The loss of each step over all replicas, by algorithm 1 of arXiv:2311.08105.

    With `overlap`, the agreed weights are applied one step later, mixed half and half with a replica's own
    (arXiv:2501.18512). `bad`: a replica, and a step that it does not take. The trainer, of one process, delivers the
    initial weights, the batches and the learning rate.
    """
    with masked_trainer(rank, world_size, path, plan) as trainer:
        step_of, losses, late = trainer.train_step, [], None
        outer = step_of.learner.engine.decoder
        models = [copy.deepcopy(outer) for _ in range(replicas)]
        inner = [torch.optim.AdamW(each.parameters(), betas=(0.9, 0.95), weight_decay=0.0) for each in models]
        optimizer = torch.optim.SGD(outer.parameters(), outer_rate, momentum, nesterov=momentum > 0)
        for step in range(trainer.num_steps):
            whole = step_of.loader.batch(step).microbatches
            inputs = torch.cat([each.input_ids for each in whole])
            labels = torch.cat([each.labels for each in whole])
            total = 0.0
            shares = zip(models, inner, inputs.chunk(replicas), labels.chunk(replicas), strict=True)
            for number, (model, adam, ids, wanted) in enumerate(shares):
                logits = model(ids).logits.flatten(0, 1)
                loss = cross_entropy(logits, wanted.flatten(), ignore_index=-100, reduction="sum")
                adam.zero_grad()
                (loss / (wanted != -100).sum()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                adam.param_groups[0]["lr"] = step_of.schedule(step)
                if (number, step) != bad:
                    adam.step()
                total += loss.item()
            losses.append(total / (labels != -100).sum().item())
            if late is not None:
                step_outer(outer, optimizer, late)
                for model in models:
                    take(model, outer, 0.5)
                late = None
            is_last = step + 1 == trainer.num_steps
            if is_last or (step + 1) % every == 0:
                changes = [
                    torch.stack([theirs - ours for ours in each]).mean(0).detach()
                    for theirs, *each in zip(outer.parameters(), *(model.parameters() for model in models), strict=True)
                ]
                if overlap and not is_last:
                    late = changes
                else:
                    step_outer(outer, optimizer, changes)
                    for model in models:
                        take(model, outer, 1.0)
        return losses, {name: each.detach() for name, each in outer.named_parameters()}


def step_outer(outer, optimizer, changes):
    """A step of the outer optimizer with the mean change as the gradient."""
    for parameter, change in zip(outer.parameters(), changes, strict=True):
        parameter.grad = change
    optimizer.step()


@torch.no_grad()
def take(model, outer, share):
    """Move a replica's weights to the agreed ones, or a part of the way."""
    for ours, theirs in zip(model.parameters(), outer.parameters(), strict=True):
        ours.copy_(share * theirs + (1 - share) * ours)
