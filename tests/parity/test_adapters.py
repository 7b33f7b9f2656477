"""Adapters under every data-parallel strategy: the curve of one process, whose own is that of PEFT (tests/peer)."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.learn.checkpoint.export import export_run
from tests.cases import slow
from tests.families import load_run_model
from tests.parity.test_parity import check
from tests.parity.training import Row, assert_same_curve, bounds, check_exact_resume, tensors_of, train, with_ranks

pytestmark = pytest.mark.dist

ROWS = [
    with_ranks(Row(parallel=parallel, adapter=adapter), ranks)
    for adapter, ranks, parallel in (
        ("lora", 2, "ddp"), ("lora", 2, "zero1"), ("lora", 4, "fsdp"), ("qlora", 2, "ddp"), ("qlora", 2, "fsdp"),
        ("dora", 2, "zero1"), ("dora", 2, "fsdp"),
        ("pissa", 2, "fsdp"), ("rslora", 2, "ddp"), ("whole", 2, "ddp"), ("qlora whole", 2, "fsdp"),
    )
]  # fmt: skip
OPTIONS = [
    with_ranks(Row("ddp", adapter="qlora", checkpointing="selective"), 2, micro_batch=2),
    with_ranks(Row("fsdp", adapter="lora", checkpointing="selective"), 2, micro_batch=2),
    with_ranks(Row("ddp", adapter="lora", family="gpt2", tied=True, precision="bf16"), 2),
    with_ranks(Row("zero2", adapter="qlora fp4", family="gemma2", tied=True, optimizer="lion"), 2, micro_batch=1),
    with_ranks(Row("hsdp", adapter="dora", family="qwen3", precision="bf16"), 4),
    with_ranks(Row("fsdp", adapter="lora", family="stablelm"), 2),
    with_ranks(Row("fsdp", adapter="experts", family="qwen3_moe", checkpointing="full"), 2, micro_batch=2),
]
PRODUCT = [
    with_ranks(Row(parallel=parallel, adapter=adapter), ranks)
    for adapter in ("full", "lora", "qlora", "dora")
    for parallel in ("ddp", "zero1", "fsdp")
    for ranks in (1, 2, 4)
]
SLOW = [
    with_ranks(Row("fsdp", adapter="lora", checkpointing="full", compile=True), 2, micro_batch=2),
    with_ranks(Row("zero1", adapter="whole", tied=True), 4, micro_batch=1),
    with_ranks(Row("fsdp", adapter="qlora", checkpointing="full", compile=True, precision="bf16"), 2),
    with_ranks(Row("fsdp", adapter="qlora", checkpointing={"mlp_tiles": 3}, precision="bf16"), 2),
    with_ranks(Row("fsdp", adapter="whole", tied=True, checkpointing="full", compile=True, precision="bf16"), 2),
    with_ranks(Row("ddp", adapter="experts", family="mixtral", precision="bf16"), 2),
    with_ranks(Row("fsdp", adapter="4-bit experts", family="mixtral", checkpointing="full", precision="bf16"), 2),
    with_ranks(Row("ddp", adapter="4-bit experts", family="qwen3_moe"), 2, micro_batch=2),
    with_ranks(Row("zero1", adapter="qlora experts", family="deepseek_v3", checkpointing="selective"), 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW + PRODUCT, ids=str)
def test_equals_one_process_whole_product(workers, references, text, tmp_path, row):
    check(workers, references, text, tmp_path, row)


@pytest.mark.parametrize("row", ROWS + OPTIONS, ids=str)
def test_equals_one_process(workers, references, text, tmp_path, row):
    check(workers, references, text, tmp_path, row)


RESUMED = [
    with_ranks(Row("ddp", adapter="lora"), 2),
    slow(with_ranks(Row("fsdp", adapter="qlora", precision="bf16"), 2)),
    slow(with_ranks(Row("zero1", adapter="dora"), 2)),
    slow(with_ranks(Row("fsdp", adapter="pissa"), 2)),
    slow(with_ranks(Row("fsdp", adapter="experts", family="mixtral"), 2)),
]


@pytest.mark.parametrize("row", RESUMED, ids=str)
def test_three_and_three_steps_are_six_bit_for_bit(workers, text, tmp_path, row):
    saved = check_exact_resume(partial(train, workers, row), tmp_path, text, steps=6)
    assert all("lora_" in name for name in saved), "nothing frozen is in a checkpoint"


def test_what_is_trained_whole_resumes_bit_for_bit(workers, text, tmp_path):
    row = with_ranks(Row("fsdp", adapter="whole", tied=True), 2)
    saved = check_exact_resume(partial(train, workers, row), tmp_path, text, steps=6)
    whole = {name for name in saved if name.startswith("model.") and "lora_" not in name}
    assert whole == {"model.model.embed_tokens.weight", "model.model.norm.weight"}, "the tied head is not there twice"


MOVES = [
    slow(with_ranks(Row("ddp", adapter="whole"), 2), with_ranks(Row("fsdp", adapter="whole"), 4)),
    (with_ranks(Row("fsdp", adapter="qlora"), 4), Row("ddp", adapter="qlora")),
    *(
        slow(with_ranks(Row(first, adapter=adapter), 2), with_ranks(Row("fsdp", adapter=adapter), 4))
        for first, adapter in (("ddp", "lora"), ("zero1", "dora"))
    ),
    slow(Row(adapter="experts", family="mixtral"), with_ranks(Row("fsdp", adapter="experts", family="mixtral"), 2)),
]


@pytest.mark.parametrize(("first", "second"), MOVES, ids=str)
def test_an_adapter_goes_on_under_another_plan(workers, text, tmp_path, references, first, second):
    train(workers, first, tmp_path, text, steps=4, stop_at=2)
    rows = train(workers, second, tmp_path, text, steps=4)
    assert_same_curve(rows, references(second.reference()), bounds(second))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["experts", "4-bit experts"])
def test_a_merged_export_of_experts_computes_the_same(workers, text, tmp_path, adapter):
    train(workers, with_ranks(Row("fsdp", adapter=adapter, family="mixtral"), 2), tmp_path, text)
    export_run(tmp_path / "run", tmp_path / "merged")
    ids = torch.arange(32).reshape(2, 16) + 64
    models = (
        load_run_model(tmp_path / "run", torch.device("cpu")), AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    )  # fmt: skip
    with torch.no_grad():
        ours, merged = (model.eval()(input_ids=ids).logits for model in models)
    assert torch.allclose(ours, merged, atol=2e-5)


def test_what_is_frozen_stays(workers, text, tmp_path):
    """A planted mistake the rows would not show: everything trains, alike on every rank."""
    train(workers, with_ranks(Row("fsdp", adapter="lora"), 2), tmp_path, text)
    saved = tensors_of(tmp_path / "run", step=4)
    trained = {name for name in saved if name.startswith("model.")}
    assert len(trained) == 2 * 7 * 2  # A and B beside seven linear layers in each of two
    assert all(torch.count_nonzero(saved[name]) for name in trained)
