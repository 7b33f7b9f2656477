"""Mixtures of experts under tensor parallelism, alone and beside expert parallelism, against one process."""

from functools import partial

import pytest

from echelon.planner.axes.table import divide_shape
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from tests.cases import slow
from tests.parity.test_expert_parallel import check_experts
from tests.parity.test_memory_parts import measure
from tests.parity.test_tensor import check_second_half, compare_gradients
from tests.parity.training import Row, bounds, check_exact_resume, difference, train, write_recipe

pytestmark = pytest.mark.dist

MOE = "qwen3_moe"
TP2, SP2 = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
TP2_EP2 = {"dp_shard": 2, "ep": 2, "tp": 2}
HEADS = (("num_key_value_heads", 4),)
DAILY = [Row(TP2, ranks=2, micro_batch=4, family="mixtral")]
ROWS = [
    Row(SP2, ranks=2, micro_batch=4, family="mixtral", tied=True),
    Row(TP2, ranks=2, micro_batch=4, family=MOE, tied=True),
    Row(SP2, ranks=2, micro_batch=4, family=MOE, checkpointing="full"),
    Row({"tp": 4}, ranks=4, micro_batch=4, family=MOE, fields=HEADS),
    Row({**TP2, "dp_shard": 2}, ranks=4, micro_batch=2, family=MOE, checkpointing="selective"),
    Row({**SP2, "dp_replicate": 2}, ranks=4, micro_batch=2, family="mixtral"),
    Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, family=MOE, precision="bf16"),
    Row(TP2, ranks=2, micro_batch=4, family=MOE, adapter="lora"),
    Row(SP2, ranks=2, micro_batch=4, family="mixtral", adapter="dora"),
    Row(TP2, ranks=2, micro_batch=4, family=MOE, optimizer="muon"),
    Row({**TP2, "dp_shard": 2}, ranks=4, micro_batch=2, family=MOE, optimizer="adafactor"),
    Row(SP2, ranks=2, micro_batch=4, family=MOE, compile=True),
    Row({**TP2, "pp": 2}, ranks=4, micro_batch=2, family="mixtral"),
    Row({**SP2, "cp": 2}, ranks=4, micro_batch=4, family=MOE),
]
BESIDE_EP = [
    Row(TP2_EP2, ranks=4, micro_batch=2, family="mixtral"),
    Row(TP2_EP2, ranks=4, micro_batch=2, family=MOE, tied=True, checkpointing="full"),
    Row({**TP2_EP2, "sequence_parallel": True}, ranks=4, micro_batch=2, family=MOE),
    Row({**TP2_EP2, "sequence_parallel": True}, ranks=4, micro_batch=2, family=MOE, compile=True, precision="bf16"),
    Row({**TP2_EP2, "reduce_gradients": "last"}, ranks=4, micro_batch=2, family="mixtral"),
    Row(TP2_EP2, ranks=4, micro_batch=2, family="mixtral", adapter="lora"),
    Row(TP2_EP2, ranks=4, micro_batch=2, family="mixtral", optimizer="adafactor"),
]


@pytest.mark.parametrize("row", [*DAILY, *(slow(row) for row in (*ROWS, *BESIDE_EP))], ids=str)
def test_equals_one_process(workers, references, text, tmp_path, publish, row):
    check_experts(workers, references, text, tmp_path, row, publish)


ON_EIGHT = [
    Row({"dp_replicate": 2, **TP2_EP2}, ranks=8, micro_batch=1, family="mixtral"),
    Row({**TP2_EP2, "dp_shard": 4}, ranks=8, micro_batch=1, family=MOE),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", ON_EIGHT, ids=str)
def test_eight_processes_equal_one(eight_workers, references, text, tmp_path, publish, row):
    check_experts(eight_workers, references, text, tmp_path, row, publish)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["router gradient counted by every rank", "router gradient of own experts"])
@pytest.mark.parametrize("row", [ROWS[1], BESIDE_EP[2]], ids=str)
def test_a_wrong_gradient_of_the_router_turns_rows_red(workers, references, text, tmp_path, row, mutation):
    rows, expected = train(workers, row, tmp_path, text, mutation=mutation), references(row.reference())
    assert difference(rows, expected)[1] > bounds(row)[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", MOE])
def test_every_gradient_equals_that_of_one_process(workers, text, tmp_path, family):
    """With all weights drawn at random, so that routers are far from even."""
    names = compare_gradients(workers, Row(family=family), tmp_path, text)
    assert {name.split(".")[-2] for name in names} >= {"gate", "experts"}


@pytest.mark.slow
@pytest.mark.parametrize("row", [DAILY[0], ROWS[3], BESIDE_EP[2]], ids=str)
def test_a_rank_needs_the_memory_that_is_planned_for_it(workers, text, tmp_path, row):
    """Weights and gradients exactly; activations with the experts of a token that a rank might have at most."""
    path, config = str(write_recipe(row, tmp_path, text, steps=4)), row.config()
    reduced = {"reshard_after_forward": True, "reduce_gradients": "each", "micro_batch_size": 4}
    plan = ParallelPlan("tp", **row.parallel, **reduced)
    measured, planned = workers.run(measure, plan.world_size, path, plan, config)[0]
    tables = 2 * 8 * 4  # the frequencies of rotary positions, twice
    assert (measured.weights, measured.gradients) == (planned.weights + tables, planned.gradients)
    share = divide_shape(build_shape(config), plan).num_parameters // plan.dp_shard
    assert measured.gradients == 4 * share < 4 * build_shape(config).num_parameters / plan.world_size * 1.1
    assert 0.6 * planned.activations < measured.activations < 1.1 * planned.activations


FIRST_AND_SECOND = [
    (Row(TP2, ranks=2, family=MOE), Row(family=MOE)),
    (Row(family=MOE), Row(SP2, ranks=2, family=MOE)),
    (Row({**TP2, "dp_shard": 2}, ranks=4, micro_batch=2, family=MOE), Row("fsdp", ranks=2, family=MOE, micro_batch=2)),
    (Row("fsdp", ranks=2, family=MOE, micro_batch=2), Row(TP2_EP2, ranks=4, micro_batch=2, family=MOE)),
    (Row(TP2_EP2, ranks=4, micro_batch=2, family=MOE), Row(TP2, ranks=2, family=MOE)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), FIRST_AND_SECOND, ids=str)
def test_a_checkpoint_loads_with_and_without_it(workers, references, text, tmp_path, first, second):
    check_second_half(workers, references, text, tmp_path, first, second)


@pytest.mark.slow
@pytest.mark.parametrize("row", [ROWS[4], BESIDE_EP[2]], ids=str)
def test_a_resumed_run_is_the_same_bit_for_bit(workers, text, tmp_path, row):
    check_exact_resume(partial(train, workers, row), tmp_path, text, steps=4)
