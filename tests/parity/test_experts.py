"""Mixtures of experts: loss, router loss and gradient norm are those of one process, under every plan."""

import pytest

from tests.families import small_config
from tests.parity.training import Row, assert_same_curve, bounds, difference, train, with_ranks

pytestmark = pytest.mark.dist

MOE = "qwen3_moe"
DAILY = [
    with_ranks(Row("ddp", family=MOE), 2, micro_batch=2),
    with_ranks(Row("fsdp", family=MOE, checkpointing="full"), 2, micro_batch=2),
]
MORE = [
    Row(family=MOE, micro_batch=4),
    with_ranks(Row("ddp", family="mixtral", checkpointing="selective", compile=True), 2),
    with_ranks(Row("ddp", family=MOE, precision="bf16"), 2),
    with_ranks(Row("zero1", family=MOE, checkpointing="full", compile=True), 2, micro_batch=2),
    with_ranks(Row("zero2", family="mixtral"), 2, micro_batch=2),
    with_ranks(Row("fsdp", family="mixtral", compile=True), 2),
    with_ranks(Row("fsdp", family=MOE, checkpointing="selective"), 4, micro_batch=1),
    with_ranks(Row("fsdp", family=MOE, precision="bf16", checkpointing="full"), 2),
    with_ranks(Row("hsdp", family=MOE), 4),
]


def router_losses(rows):
    return [row["router_loss"] for row in rows if row["kind"] == "train"]


def check(workers, references, text, folder, row):
    rows, expected = train(workers, row, folder, text), references(row.reference())
    assert_same_curve(rows, expected, bounds(row))
    assert router_losses(rows) == pytest.approx(router_losses(expected), abs=bounds(row)[0])


@pytest.mark.parametrize("row", DAILY, ids=str)
def test_equals_one_process(workers, references, text, tmp_path, row):
    check(workers, references, text, tmp_path, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", MORE, ids=str)
def test_equals_one_process_in_other_ways(workers, references, text, tmp_path, row):
    check(workers, references, text, tmp_path, row)


def test_a_router_loss_of_every_rank_turns_rows_red(workers, references, text, tmp_path):
    row = DAILY[0]
    rows = train(workers, row, tmp_path, text, mutation="a router loss of every rank")
    assert difference(rows, references(row.reference()))[1] > bounds(row)[1]


def test_a_row_says_what_the_router_loss_is(workers, references, text, tmp_path):
    """A number where it is trained, null where the config asks for none, and in a dense model's rows."""
    trained = router_losses(references(Row(family=MOE)))
    assert all(1.0 <= each <= 4.0 for each in trained)  # E / K = 4 is one pair of experts for every token
    model = {"router_aux_loss_coef": 0.0}
    row = Row(family=MOE, changes={"model": {"config": {**small_config(MOE), **model}}})
    rows = train(workers, row, tmp_path, text)
    assert set(router_losses(rows)) == {None} == set(router_losses(references(Row())))
    assert difference(rows, references(Row(family=MOE)))[1] > 1e-3
