"""Parameter servers in plain torch, in one process: what servers wrote down, in their order; and compressed pushes."""

import torch
from torch.nn.functional import cross_entropy

from echelon.learn.sync.pushes import Kind
from tests.parity.training import masked_trainer


def replay(rank, world_size, path, plan, workers, journals, parts, compensation=0.0):
    """The loss of each step over all shares, and the last weights.

    Args:
        journals: what each server answered, in order: kind, step and share.
        parts: the names of the weights of each server.
        compensation: the factor of Zheng et al., arXiv:1609.08326.
    """
    with masked_trainer(rank, world_size, path, plan) as trainer:
        model, rate = trainer.train_step.learner.engine.decoder, trainer.train_step.schedule
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        servers = [
            torch.optim.AdamW([weights[name] for name in part], betas=(0.9, 0.95), weight_decay=0.0) for part in parts
        ]
        pulled, gradients, losses = {}, {}, {}
        positions = [0] * len(journals)
        while any(position < len(journal) for position, journal in zip(positions, journals, strict=True)):
            before = list(positions)
            for number, (part, journal) in enumerate(zip(parts, journals, strict=True)):
                while positions[number] < len(journal):
                    kind, step, share = journal[positions[number]]
                    if kind == Kind.PULL:
                        view = pulled.setdefault((step, share), {})
                        view |= {name: weights[name].clone() for name in part}
                        if len(view) == len(weights):
                            gradients[step, share], loss = differentiate(trainer, view, step, share, workers)
                            losses.setdefault(step, []).append(loss)
                    elif (step, share) in gradients:
                        for name in part:
                            gradient, change = gradients[step, share][name], weights[name] - pulled[step, share][name]
                            weights[name].grad = gradient + compensation * gradient * gradient * change
                        servers[number].param_groups[0]["lr"] = rate(step)
                        servers[number].step()
                    else:
                        break  # another server has not given its part yet
                    positions[number] += 1
            assert positions != before, "a gradient was pushed for which nothing was pulled"
        totals = [torch.tensor(losses[step]).sum(0) for step in sorted(losses)]
        return [(total / count).item() for total, count in totals], weights


def differentiate(trainer, view, step, share, workers, max_norm=1.0):
    """The mean gradient of a share, clipped, and the sum of its losses with the number of its targets."""
    model, loader = trainer.train_step.learner.engine.decoder, trainer.train_step.loader
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(view[name])
    loader.reshare(share, workers)
    batch = loader.batch(step).microbatches
    ids, labels = (torch.cat([getattr(each, key) for each in batch]) for key in ("input_ids", "labels"))
    loss = cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    count = (labels != -100).sum().item()
    model.zero_grad()
    (loss / max(1, count)).backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return {name: each.grad.clone() for name, each in model.named_parameters()}, [loss.item(), float(count)]


def add_up(rank, world_size, path, plan, workers, compress):
    """The loss of each step with one server that waits for all workers, and SGD with momentum 0.9.

    Args:
        compress: of the gradients of a worker, by name, with a dict of its own: what it pushes.
    """
    with masked_trainer(rank, world_size, path, plan) as trainer:
        model, rate = trainer.train_step.learner.engine.decoder, trainer.train_step.schedule
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        kept, losses = [{} for _ in range(workers)], []
        for step in range(trainer.num_steps):
            weights = {name: each.detach().clone() for name, each in model.named_parameters()}
            pushed, sums = [], []
            for share in range(workers):
                gradients, counted = differentiate(trainer, weights, step, share, workers, max_norm=None)
                pushed.append(compress(gradients, kept[share]))
                sums.append(counted)
            total, count = torch.tensor(sums, dtype=torch.float64).sum(0).tolist()
            losses.append(total / count)
            for name, parameter in model.named_parameters():
                parameter.grad = sum(each[name] * own for each, (_, own) in zip(pushed, sums, strict=True)) / count
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
        return losses
