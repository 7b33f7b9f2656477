"""Distillation from a teacher in memory trains under every plan as in one process."""

from dataclasses import replace

import pytest

from tests.families import small_model
from tests.parity.training import Row, check_training, references, train, with_ranks

pytestmark = pytest.mark.dist

ROWS = [
    with_ranks(Row("ddp"), 2, micro_batch=2),
    with_ranks(Row("fsdp", checkpointing="full"), 2),
    Row({"tp": 2}, ranks=2),
    with_ranks(Row("fsdp", adapter="lora"), 2),
    pytest.param(with_ranks(Row("ddp", compile=True), 2, micro_batch=2), marks=pytest.mark.slow),
    pytest.param(with_ranks(Row("zero1", precision="bf16"), 2), marks=pytest.mark.slow),
    pytest.param(Row({"tp": 2, "dp_shard": 2}, ranks=4), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def loss(tmp_path_factory):
    """The section of the recipe; the teacher is wider than the model, and of another family."""
    folder = tmp_path_factory.mktemp("teacher")
    small_model("qwen3", seed=5).save_pretrained(folder)
    return {"objective": {"name": "distill", "teacher": str(folder), "loss": "jsd", "beta": 0.3, "sft_weight": 0.1}}


@pytest.fixture(scope="module")
def alone(workers, text, loss, tmp_path_factory):
    return references(workers, text, tmp_path_factory.mktemp, loss)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_process(workers, alone, loss, text, tmp_path, row):
    rows, expected = train(workers, replace(row, changes=loss), tmp_path, text), alone(row)
    ours, theirs, loss_bound = check_training(row, rows, expected)
    for name in ("loss", "cross_entropy", "kl", "entropy"):
        assert ours[name] == pytest.approx(theirs[name], abs=loss_bound)
    assert ours["agreement"] == pytest.approx(theirs["agreement"], abs=0.02)
