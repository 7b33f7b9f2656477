"""Expert parallelism: losses, router losses and gradient norms are those of one process."""

from functools import partial

import pytest

from tests.parity.test_parity import check
from tests.parity.training import Row, assert_same_curve, bounds, check_exact_resume, difference, train, with_ranks

pytestmark = pytest.mark.dist

MOE = "qwen3_moe"
DAILY = [with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE, checkpointing="full"), 2, micro_batch=2)]
MORE = [
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family="mixtral"), 2, micro_batch=2),
    with_ranks(Row({"dp_shard": 4, "ep": 2}, family="mixtral"), 4),
    with_ranks(Row({"dp_shard": 4, "ep": 2}, family=MOE, checkpointing="selective"), 4, micro_batch=1),
    with_ranks(Row({"dp_shard": 4, "ep": 4}, family=MOE), 4),
    with_ranks(Row({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, family=MOE), 4),
    with_ranks(Row({"cp": 2, "dp_shard": 2, "ep": 2}, family=MOE), 4, micro_batch=2),
    with_ranks(Row({"cp": 2, "cp_method": "ulysses", "dp_shard": 2, "ep": 4}, family="mixtral"), 4, micro_batch=4),
    with_ranks(Row({"cp": 2, "dp_shard": 1, "ep": 2}, family="mixtral"), 2, micro_batch=8),
    with_ranks(Row({"dp_shard": 2, "ep": 2, "reshard_after_forward": False}, family=MOE), 2, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "ep": 2, "reduce_gradients": "last"}, family="mixtral"), 2, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE, compile=True), 2),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE, compile=True, checkpointing="full"), 2),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE, compile=True, checkpointing="selective"), 2),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE, precision="bf16"), 2),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE, optimizer="muon"), 2),
    with_ranks(Row({"dp_shard": 4, "ep": 2}, family="mixtral", optimizer="adafactor"), 4),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE, adapter="lora"), 2),
]


def column(rows, name):
    return [row[name] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("row", DAILY + [pytest.param(row, marks=pytest.mark.slow) for row in MORE], ids=str)
def test_equals_one_process(workers, references, text, tmp_path, publish, row):
    check_experts(workers, references, text, tmp_path, row, publish)


def check_experts(workers, references, text, folder, row, publish):
    """As `check`, and the router losses and loads of experts are those of one process."""
    rows, expected = check(workers, references, text, folder, row, publish)
    if row.adapter == "full":
        assert column(rows, "router_loss") == pytest.approx(column(expected, "router_loss"), abs=bounds(row)[0])
        assert column(rows, "expert_load") == pytest.approx(column(expected, "expert_load"), rel=0.05)
        assert all(1 <= load <= 4 for load in column(rows, "expert_load"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        with_ranks(Row({"dp_shard": 4, "ep": 2}, family="mixtral"), 4, micro_batch=1),
        with_ranks(Row({"dp_shard": 4, "ep": 4}, family=MOE, checkpointing="full"), 4),
    ],
    ids=str,
)
def test_rows_of_a_fixed_number_equal_one_process(workers, references, text, tmp_path, row):
    """Rows of a fixed number, as GPUs have them under tp without ep; here they are sent."""
    rows = train(workers, row, tmp_path, text, mutation="experts of fixed capacity")
    expected = references(row.reference())
    assert_same_curve(rows, expected, bounds(row))
    assert column(rows, "router_loss") == pytest.approx(column(expected, "router_loss"), abs=bounds(row)[0])


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["a router loss of every rank", "gradients of experts counted twice"])
def test_a_planted_mistake_turns_rows_red(workers, references, text, tmp_path, mutation):
    row = with_ranks(Row({"dp_shard": 4, "ep": 2}, family=MOE), 4)
    rows, expected = train(workers, row, tmp_path, text, mutation=mutation), references(row.reference())
    assert difference(rows, expected)[1] > bounds(row)[1]


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one(workers, text, tmp_path):
    row = with_ranks(Row({"dp_shard": 4, "ep": 2}, family=MOE), 4)
    check_exact_resume(partial(train, workers, row), tmp_path, text, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ep", "fsdp"])
def test_a_checkpoint_loads_with_and_without_ep(workers, references, text, tmp_path, first):
    split = with_ranks(Row({"dp_shard": 4, "ep": 2}, family=MOE), 4)
    plain = with_ranks(Row("fsdp", family=MOE), 2)
    rows = [split, plain] if first == "ep" else [plain, split]
    train(workers, rows[0], tmp_path, text, stop_at=2)
    assert_same_curve(train(workers, rows[1], tmp_path, text), references(split.reference()))
