"""The options of the parity table, their product, and a covering array of it."""

import itertools

from training import GLOBAL_BATCH, Row

OPTIONS = {
    "plan": [("ddp", 1), ("ddp", 2), ("ddp", 4), ("zero1", 2), ("zero1", 4), ("zero2", 2), ("zero2", 4),
             ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)],
    "accumulation": [1, 2],
    "model": [("llama", False), ("llama", True), ("gpt2", True), ("qwen3", False), ("gemma2", True)],
    "checkpointing": ["none", "selective", "full"],
    "compile": [False, True],
    "precision": ["fp32", "bf16"],
}  # fmt: skip


def build_row(plan, accumulation, model, checkpointing, compile, precision) -> Row:
    """One point of the product as a row."""
    parallel, ranks = plan
    micro_batch = max(1, GLOBAL_BATCH // ranks // accumulation)
    return Row(parallel, ranks, micro_batch, model[0], model[1], checkpointing, compile, precision)


def cover_pairs() -> list[Row]:
    """A greedy covering array: every value of every option meets every value of every other one."""
    names = list(OPTIONS)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(OPTIONS[a]))
        for j in range(len(OPTIONS[b]))
    }
    points = list(itertools.product(*(range(len(OPTIONS[name])) for name in names)))
    chosen = []
    while missing:
        best = max(points, key=lambda point: len(missing & pairs_of(names, point)))
        missing -= pairs_of(names, best)
        chosen.append(build_row(*(OPTIONS[name][index] for name, index in zip(names, best, strict=True))))
    return chosen


def pairs_of(names: list[str], point: tuple[int, ...]) -> set:
    """The pairs of values that a point covers."""
    return set(itertools.combinations(zip(names, point, strict=True), 2))


COVERING = cover_pairs()
FULL = [build_row(*values) for values in itertools.product(*OPTIONS.values())]
