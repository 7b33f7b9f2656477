"""Compressed sums of gradients as the papers write them, in plain torch, for all workers in one process.

Each function takes the gradients of each worker, by name, and a dict for what it keeps; it returns the sums.
"""

import torch

from echelon.learn.model.seeds import derive_seed

RANK, FRACTION, SEED = 2, 0.1, 5


def powersgd(step, workers, state):
    """Algorithms 1 and 2 of arXiv:1905.13727, with the means of the paper, times the number of workers."""
    sums = {}
    for name, first in workers[0].items():
        rows, columns = (len(first), first.numel() // len(first)) if first.dim() > 1 else (0, 0)
        if first.dim() < 2 or RANK * (rows + columns) >= first.numel():
            sums[name] = sum(each[name] for each in workers)
            continue
        if name not in state:
            generator = torch.Generator().manual_seed(derive_seed(SEED, name))
            state[name] = torch.randn(columns, RANK, generator=generator), [torch.zeros(rows, columns) for _ in workers]
        q, errors = state[name]
        deltas = [each[name].view(rows, columns) + error for each, error in zip(workers, errors, strict=True)]
        p = torch.stack([delta @ q for delta in deltas]).mean(0)
        for column in range(RANK):  # Gram-Schmidt
            for before in range(column):
                p[:, column] -= (p[:, before] @ p[:, column]) * p[:, before]
            p[:, column] /= p[:, column].norm()
        own = [delta.T @ p for delta in deltas]
        q = torch.stack(own).mean(0)
        state[name] = q, [delta - p @ q.T for delta in deltas]
        sums[name] = len(workers) * (p @ q.T).view_as(first)
    return sums


def _with_memory(step, workers, state, compress):
    """Algorithm 1 of arXiv:1809.07599, and algorithm 2 of arXiv:1901.09847: e = (g + e) - compress(g + e)."""
    sums = {name: torch.zeros_like(first) for name, first in workers[0].items()}
    for number, gradients in enumerate(workers):
        for name, gradient in gradients.items():
            corrected = gradient + state.get((number, name), 0)
            sent = compress(step, name, corrected)
            state[number, name] = corrected - sent
            sums[name] += sent
    return sums


def _largest(step, name, values):
    count = max(1, int(FRACTION * values.numel()))
    smallest = values.abs().flatten().sort(descending=True).values[count - 1]
    return torch.where(values.abs() >= smallest, values, 0)


def _random(step, name, values):
    count = max(1, int(FRACTION * values.numel()))
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(derive_seed(SEED, step, name)))
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    mask[order[:count]] = True
    return torch.where(mask.view_as(values), values, 0)


def _sign(step, name, values):
    """Each row of a matrix and each vector is a block of arXiv:1905.10936."""
    rows = values.view(-1, values.shape[-1])
    sent = [row.abs().sum() / len(row) * torch.where(row < 0, -1.0, 1.0) for row in rows]
    return torch.stack(sent).view_as(values)


def topk(step, workers, state):
    return _with_memory(step, workers, state, _largest)


def randomk(step, workers, state):
    return _with_memory(step, workers, state, _random)


def sign(step, workers, state):
    return _with_memory(step, workers, state, _sign)


def _rounded(dtype, workers):
    return {
        name: sum(each[name].to(dtype).float() for each in workers).to(dtype).float() for name in workers[0]
    }  # fmt: skip


def bf16(step, workers, state):
    return _rounded(torch.bfloat16, workers)


def fp16(step, workers, state):
    return _rounded(torch.float16, workers)


def int8(step, workers, state):
    """Blocks of 256 over all values together, each with its own scale; the sum is rounded once more."""
    sizes = {name: each.numel() for name, each in workers[0].items()}

    def quantize(flat):
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).view(-1, 256)
        scale = blocks.abs().max(dim=1, keepdim=True).values / 127
        return torch.where(scale > 0, torch.round(blocks / scale.clamp(min=1e-38)) * scale, 0).flatten()[: len(flat)]

    flat = [torch.cat([each[name].flatten() for name in sizes]) for each in workers]
    parts = torch.split(quantize(sum(quantize(each) for each in flat)), list(sizes.values()))
    return {name: part.view_as(workers[0][name]) for name, part in zip(sizes, parts, strict=True)}


ORACLES = {
    "bf16": bf16, "fp16": fp16, "int8": int8, "powersgd": powersgd, "topk": topk, "randomk": randomk, "sign": sign,
}  # fmt: skip
