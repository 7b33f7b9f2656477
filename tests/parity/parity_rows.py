"""The options of the parity table, their product, and a covering array of it."""

import itertools

from tests.parity.training import GLOBAL_BATCH, Row, with_ranks

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
    points = itertools.product(*(range(len(OPTIONS[name])) for name in names))
    pairs = {point: pairs_of(names, point) for point in points}
    chosen = []
    while missing:
        best = max(pairs, key=lambda point: len(missing & pairs[point]))
        missing -= pairs[best]
        chosen.append(build_row(*(OPTIONS[name][index] for name, index in zip(names, best, strict=True))))
    return chosen


def pairs_of(names: list[str], point: tuple[int, ...]) -> set:
    """The pairs of values that a point covers."""
    return set(itertools.combinations(zip(names, point, strict=True), 2))


COVERING = cover_pairs()
# Every optimizer under replication and both kinds of sharding; every precision under both.
OPTIMIZERS = [
    with_ranks(Row("ddp", optimizer="lion", family="gpt2", tied=True), 2),
    with_ranks(Row("zero1", optimizer="lion"), 4, micro_batch=1),
    with_ranks(Row("fsdp", optimizer="lion"), 2),
    with_ranks(Row("ddp", optimizer="sgd"), 2, micro_batch=2),
    with_ranks(Row("zero2", optimizer="sgd", family="gpt2", tied=True), 2, micro_batch=2),
    with_ranks(Row("fsdp", optimizer="sgd"), 4),
    with_ranks(Row("ddp", optimizer="muon"), 2),
    with_ranks(Row("zero1", optimizer="muon", family="gpt2", tied=True), 2),
    with_ranks(Row("hsdp", optimizer="muon", family="qwen3"), 4),
    with_ranks(Row("fsdp", optimizer="muon"), 4, micro_batch=1),
    with_ranks(Row("ddp", optimizer="adafactor"), 2),
    with_ranks(Row("zero2", optimizer="adafactor", family="gpt2", tied=True), 4),
    with_ranks(Row("hsdp", optimizer="adafactor"), 4),
    with_ranks(Row("fsdp", optimizer="adafactor", family="qwen3"), 2, micro_batch=2),
    with_ranks(Row("ddp", optimizer="adamw_8bit"), 2),
    with_ranks(Row("zero1", optimizer="adamw_8bit"), 4),
    with_ranks(Row("fsdp", optimizer="adamw_8bit", family="gpt2", tied=True), 4),
]
PRECISIONS = [
    Row(precision="fp16", family="gpt2", tied=True),
    with_ranks(Row("ddp", precision="fp16"), 2, micro_batch=2),
    with_ranks(Row("zero1", precision="fp16", checkpointing="full"), 2, micro_batch=2),
    with_ranks(Row("fsdp", precision="fp16", family="gemma2", tied=True), 4),
    with_ranks(Row("fsdp", precision="fp16", optimizer="muon"), 2),
    with_ranks(Row("ddp", precision="bf16", master_weights="bf16_kahan"), 2, micro_batch=2),
    with_ranks(Row("zero1", precision="bf16", master_weights="bf16_kahan", family="gpt2", tied=True), 2, micro_batch=2),
    with_ranks(Row("fsdp", precision="bf16", master_weights="bf16_kahan", optimizer="adamw_8bit"), 4),
    with_ranks(Row("ddp", precision="bf16", master_weights="bf16_stochastic", optimizer="lion"), 2),
    with_ranks(Row("zero2", precision="bf16", master_weights="bf16_stochastic"), 4, micro_batch=1),
    with_ranks(Row("fsdp", precision="bf16", master_weights="bf16_stochastic", optimizer="muon"), 2),
]
TILED = [
    with_ranks(Row(parallel, checkpointing={"mlp_tiles": 3}, family=family, tied=tied, precision=precision), 2, **more)
    for parallel, family, tied, precision, more in (
        ("ddp", "gpt2", True, "bf16", {}), ("fsdp", "llama", False, "fp32", {"micro_batch": 2}),
        ("zero1", "gemma2", True, "fp32", {}), ("fsdp", "qwen3", False, "fp16", {}),
        ({"pp": 2}, "llama", True, "fp32", {"micro_batch": 2}),
    )
]  # fmt: skip
FULL = [build_row(*values) for values in itertools.product(*OPTIONS.values())]
