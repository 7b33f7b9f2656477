"""Packed documents, pairs and judged answers under every data-parallel strategy: the curve of one process."""

import itertools
import math
from dataclasses import replace

import pytest

from echelon.tools.inference import evaluate
from tests.cases import slow
from tests.parity.packed import PackedPool, pack
from tests.parity.training import Row, assert_same_curve, bounds, equal_tensors, tensors_of, train, with_ranks

pytestmark = pytest.mark.dist

DPO = {"objective": {"name": "dpo", "beta": 0.5}}
RPO = {"objective": {"name": "dpo", "beta": 0.5, "loss": "sigmoid_norm", "sft_weight": 0.5}}
ORPO = {"objective": {"name": "orpo", "beta": 0.5}}
SIMPO = {"objective": {"name": "simpo", "beta": 2.0, "gamma": 0.5}}
CPO = {"objective": {"name": "cpo", "beta": 0.1}}
KTO = {"objective": {"name": "kto", "beta": 0.5, "desirable_weight": 1.5}}
REWARD = {"objective": {"name": "reward", "center_weight": 0.05}}
CLASSIFICATION = {"objective": {"name": "classification", "labels": ["red", "green", "blue"]}}
CHANGES = {"packed": None, "pairs": DPO, "judged": KTO, "scored": REWARD, "labelled": CLASSIFICATION}
STEPS = 4
AS_TRL = 1e-5  # the bound of tests/peer, which compares one process with TRL's trainers

ROWS = [
    ("packed", with_ranks(Row("ddp", checkpointing="selective"), 2, micro_batch=2)),
    slow("packed", with_ranks(Row("zero1", compile=True), 2)),
    ("packed", with_ranks(Row("fsdp", family="gemma2", tied=True, checkpointing="full"), 2, micro_batch=2)),
    ("pairs", with_ranks(Row("ddp"), 2, micro_batch=2)),
    slow("pairs", with_ranks(Row("zero1", checkpointing="full"), 2, micro_batch=2)),
    ("pairs", with_ranks(Row("fsdp", precision="bf16"), 2)),
    slow("pairs", with_ranks(Row("ddp", adapter="lora"), 2, micro_batch=2)),
    ("pairs", with_ranks(Row("fsdp", adapter="dora", checkpointing="full"), 2)),
    slow("pairs", Row({"tp": 2}, ranks=2, micro_batch=4)),
    slow("pairs", Row({"tp": 2, "sequence_parallel": True}, ranks=2, micro_batch=4, adapter="lora")),
]
# With the mean number of tokens of a chosen answer in the whole batch, and without a reference.
ROWS += [
    pytest.param("pairs", replace(row, changes=changes), marks=[pytest.mark.slow] if is_slow else [], id=f"{changes}")
    for row, changes, is_slow in (
        (with_ranks(Row("ddp"), 2, micro_batch=2), ORPO, False),
        (with_ranks(Row("fsdp"), 2), RPO, False),
        (Row({"tp": 2}, ranks=2, micro_batch=4), ORPO, True),
        (Row({"pp": 2}, ranks=2, micro_batch=2), ORPO, True),
        (with_ranks(Row("fsdp", adapter="lora"), 2, micro_batch=2), CPO, True),
        (with_ranks(Row("fsdp"), 2), DPO, True),
        (with_ranks(Row("fsdp"), 2), ORPO, True),
        (with_ranks(Row("ddp", adapter="lora"), 2, micro_batch=2), ORPO, True),
        (with_ranks(Row("zero1"), 2, micro_batch=2), SIMPO, True),
        (with_ranks(Row("ddp"), 2, micro_batch=2), SIMPO, True),
        (with_ranks(Row("fsdp"), 2), SIMPO, True),
        (Row({"tp": 2}, ranks=2, micro_batch=4), SIMPO, True),
        (with_ranks(Row("fsdp", adapter="lora"), 2), SIMPO, True),
        (with_ranks(Row("ddp", adapter="lora"), 2), RPO, True),
        (with_ranks(Row("fsdp", family="mamba"), 2), ORPO, True),
    )
]
ROWS += [
    ("judged", with_ranks(Row("ddp"), 2, micro_batch=2)),
    ("judged", with_ranks(Row("fsdp"), 2)),
    *(
        slow("judged", row)
        for row in (
            with_ranks(Row("ddp"), 4, micro_batch=1),
            with_ranks(Row("fsdp", checkpointing="full"), 4, micro_batch=1),
            Row({"tp": 2}, ranks=2, micro_batch=4),
            with_ranks(Row("ddp", adapter="lora"), 2, micro_batch=2),
            with_ranks(Row("fsdp", adapter="lora"), 2),
            with_ranks(Row("fsdp", precision="bf16"), 2),
            with_ranks(Row("fsdp", family="mamba"), 2),
        )
    ),
]
ROWS += [
    ("scored", with_ranks(Row("ddp"), 2, micro_batch=2)),
    ("scored", with_ranks(Row("fsdp"), 2)),
    ("scored", Row({"tp": 2}, ranks=2, micro_batch=4)),
    *(
        slow("scored", row)
        for row in (
            Row({"tp": 2, "sequence_parallel": True}, ranks=2, micro_batch=4),
            Row({"tp": 2}, ranks=2, micro_batch=4, adapter="lora"),
            Row({"tp": 2, "dp_shard": 2}, ranks=4, micro_batch=2),
            with_ranks(Row("zero1", checkpointing="full"), 2, micro_batch=2),
            with_ranks(Row("zero2", family="gpt2", tied=True), 2, micro_batch=2),
            with_ranks(Row("ddp", adapter="lora"), 2, micro_batch=2),
            with_ranks(Row("fsdp", adapter="lora", family="gemma2", tied=True), 2),
            with_ranks(Row("fsdp", adapter="qlora"), 2),
            with_ranks(Row("fsdp", compile=True), 2),
            with_ranks(Row("fsdp", precision="bf16"), 2),
        )
    ),
]
ROWS += [
    ("labelled", with_ranks(Row("ddp"), 2, micro_batch=2)),
    ("labelled", with_ranks(Row("fsdp"), 2)),
    ("labelled", Row({"tp": 2}, ranks=2, micro_batch=4)),
    *(
        slow("labelled", row)
        for row in (
            Row({"tp": 2, "sequence_parallel": True}, ranks=2, micro_batch=4, adapter="lora"),
            with_ranks(Row("zero2", family="gpt2", tied=True), 2, micro_batch=2),
            with_ranks(Row("fsdp", adapter="lora", family="gemma2", tied=True), 2),
            with_ranks(Row("fsdp", compile=True), 2),
            with_ranks(Row("fsdp", precision="bf16"), 2),
        )
    ),
]
PLANS = [("ddp", 2), ("ddp", 4), ("zero1", 2), ("zero2", 4), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]
FAMILIES = [("llama", False), ("gpt2", True), ("gemma2", True)]
FULL = [
    (samples, with_ranks(Row(plan, family=family, tied=tied, adapter=adapter, precision=precision), ranks))
    for samples, (plan, ranks), (family, tied), adapter, precision in itertools.product(
        ("packed", "pairs"), PLANS, FAMILIES, ("full", "lora", "qlora"), ("fp32", "bf16")
    )
]

FULL += [("pairs", with_ranks(Row(plan, family="mamba"), ranks)) for plan, ranks in (("ddp", 2), ("fsdp", 4))]
FULL += [
    ("pairs", with_ranks(Row("zero1", adapter="lora", compile=True), 2, micro_batch=2)),
    ("pairs", with_ranks(Row("zero1", checkpointing="full", compile=True), 2, micro_batch=2)),
]


def run(workers, samples, row, folder, text, **options):
    row = replace(row, changes=row.changes or CHANGES[samples])
    return train(PackedPool(workers, samples), row, folder, text, steps=STEPS, **options)


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    """A function to the metrics of a row's training in one process."""
    trained = {}

    def find(samples, row):
        key = (samples, row.family, row.tied, row.adapter, str(row.changes))
        if key not in trained:
            one = replace(row.reference(), changes=row.changes)
            trained[key] = run(workers, samples, one, tmp_path_factory.mktemp("one"), text)
        return trained[key]

    return find


def check(workers, alone, text, folder, samples, row):
    rows, expected = run(workers, samples, row, folder, text), alone(samples, row)
    loss_bound, norm_bound = bounds(row)
    if row.changes is not None and row.precision == "fp32":
        loss_bound = AS_TRL
    assert_same_curve(rows, expected, (loss_bound, norm_bound))
    ours, theirs = ([each for each in rows if each["kind"] == "eval"][-1] for rows in (rows, expected))
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=loss_bound)
    for key in ("target_tokens", "pairs", "answers"):
        assert ours[key] == theirs[key]
    if samples == "labelled":
        assert ours["texts"] == theirs["texts"] > 0
        if row.precision != "bf16":  # which may give two scores that are close in another order
            assert ours["labels"] == theirs["labels"]
    elif samples != "packed":
        assert ours["reward_margin"] == pytest.approx(theirs["reward_margin"], abs=loss_bound)


@pytest.mark.parametrize(("samples", "row"), ROWS, ids=str)
def test_equals_one_process(workers, alone, text, tmp_path, samples, row):
    check(workers, alone, text, tmp_path, samples, row)


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "row"), FULL, ids=str)
def test_equals_one_process_whole_product(workers, alone, text, tmp_path, samples, row):
    check(workers, alone, text, tmp_path, samples, row)


def test_pairs_are_learned_from_where_training_began(alone):
    """At first the margins are 0, so that a pair's loss is ln 2; then the chosen answers gain."""
    assert alone("pairs", Row(adapter="lora"))[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    rows = alone("pairs", Row())
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[0] > losses[-1]
    final = rows[-1]
    assert final["kind"] == "eval" and final["perplexity"] is None and final["bits_per_byte"] is None
    assert final["pairs"] > 0 and 0 <= final["reward_accuracy"] <= 1
    trained = [row for row in rows if row["kind"] == "train"]
    assert trained[-1]["target_tokens"] > 100, "tokens with a label, not pairs"


@pytest.mark.parametrize(
    ("samples", "adapter"), [("pairs", "full"), ("pairs", "lora"), ("judged", "full")], ids=["full", "lora", "judged"]
)
def test_the_command_reports_what_training_did(workers, text, tmp_path, monkeypatch, samples, adapter):
    """`echelon eval`: the reference is made again, or is the model without its adapter."""
    whole = {"evaluate": {"batches": 100}}
    row = Row(adapter=adapter, changes=CHANGES[samples] | whole)
    rows = train(PackedPool(workers, samples), row, tmp_path, text, steps=2)
    opened = evaluate.open_prepared
    monkeypatch.setattr(evaluate, "open_prepared", lambda *args: pack(opened(*args), samples))
    found = evaluate.evaluate_model(tmp_path / "run")
    for key in ("loss", "reward_accuracy", "reward_margin", "pairs" if samples == "pairs" else "answers"):
        assert found[key] == pytest.approx(rows[-1][key], rel=1e-4, abs=1e-5), key
    assert "perplexity" not in found and found["tokens"] == rows[-1]["target_tokens"]


@pytest.mark.parametrize("parallel", [slow("ddp"), "fsdp"])
def test_a_resumed_run_compares_with_the_same_reference(workers, text, tmp_path, parallel):
    """The reference is in no checkpoint: it is made again. Bit for bit, also from 2 processes to 2."""
    row = with_ranks(Row(parallel), 2)
    straight = run(workers, "pairs", row, tmp_path / "straight", text)
    run(workers, "pairs", row, tmp_path / "resumed", text, stop_at=2)
    resumed = run(workers, "pairs", row, tmp_path / "resumed", text)
    losses = [[each["loss"] for each in rows if each["kind"] == "train"] for rows in (straight, resumed)]
    assert losses[0] == losses[1]
    tensors = [tensors_of(tmp_path / name / "run", step=STEPS) for name in ("straight", "resumed")]
    assert equal_tensors(*tensors)
    assert not [name for name in tensors[0] if "reference" in name]
