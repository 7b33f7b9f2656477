"""A run that stopped and went on is the run that never stopped; under another plan it is the same curve."""

import random
import shutil
from contextlib import closing
from functools import partial

import pytest

from tests.parity.training import Row, assert_same_curve, bounds, check_exact_resume, train, with_ranks
from tests.workers import WorkerPool

pytestmark = pytest.mark.dist

LONG = pytest.mark.slow  # what takes longest: four ranks, and plans that others here are much like
PLANS = [
    Row(),
    pytest.param(with_ranks(Row("ddp"), 2, micro_batch=2), marks=LONG),
    pytest.param(with_ranks(Row("ddp"), 4), marks=LONG),
    pytest.param(with_ranks(Row("zero1"), 2, micro_batch=2), marks=LONG),
    pytest.param(with_ranks(Row("zero2"), 4, micro_batch=1), marks=LONG),
    pytest.param(with_ranks(Row("fsdp"), 2), marks=LONG),
    pytest.param(with_ranks(Row("fsdp"), 4), marks=LONG),
    pytest.param(with_ranks(Row("hsdp"), 4), marks=LONG),
    with_ranks(Row("ddp", family="gpt2", tied=True, dropout=0.1), 2, micro_batch=2),
    pytest.param(with_ranks(Row("fsdp", family="gpt2", tied=True, dropout=0.1), 4), marks=LONG),
    pytest.param(Row(family="gpt2", tied=True, dropout=0.1, precision="bf16"), marks=LONG),
    pytest.param(
        with_ranks(Row("ddp", family="gpt2", tied=True, dropout=0.1, precision="bf16", checkpointing="full"), 2),
        marks=LONG,
    ),
    pytest.param(
        with_ranks(Row("fsdp", family="gpt2", tied=True, dropout=0.1, precision="bf16"), 2, micro_batch=2), marks=LONG
    ),
    pytest.param(
        with_ranks(Row("fsdp", family="gpt2", tied=True, dropout=0.1, precision="bf16"), 4, micro_batch=1), marks=LONG
    ),
    with_ranks(Row("fsdp", optimizer="muon"), 2),
    pytest.param(
        with_ranks(Row("ddp", optimizer="adamw_8bit", precision="bf16", master_weights="bf16_kahan"), 2), marks=LONG
    ),
    pytest.param(with_ranks(Row("zero1", optimizer="adafactor", precision="fp16"), 2), marks=LONG),
    pytest.param(
        with_ranks(Row("fsdp", optimizer="lion", precision="bf16", master_weights="bf16_stochastic"), 2), marks=LONG
    ),
    pytest.param(Row(optimizer="sgd", family="gpt2", tied=True, dropout=0.1), marks=LONG),
]


@pytest.mark.parametrize("row", PLANS, ids=str)
def test_five_and_five_steps_are_ten_bit_for_bit(workers, text, tmp_path, row):
    check_exact_resume(partial(train, workers, row), tmp_path, text, steps=10)


COMPILED_UPDATES = [
    Row(compile=True, optimizer="adamw_8bit", precision="bf16", master_weights="bf16_kahan"),
    with_ranks(Row("fsdp", compile=True, optimizer="lion", precision="bf16", master_weights="bf16_stochastic"), 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED_UPDATES, ids=str)
def test_a_resumed_run_compiles_the_same_updates(text, tmp_path, row):
    """Each part runs in new processes, which compile by inductor, as a resumed run does."""

    def train_anew(*arguments, **options):
        with closing(WorkerPool(row.ranks, seconds=500)) as workers:
            return train(workers, row, *arguments, **options, backend="inductor")

    check_exact_resume(train_anew, tmp_path, text, steps=6)


@pytest.fixture(scope="module")
def uninterrupted(workers, text, tmp_path_factory):
    """Ten steps on one process."""
    return train(workers, Row(), tmp_path_factory.mktemp("one"), text, steps=10)


SECOND_HALVES = [
    (with_ranks(Row("ddp"), 2), with_ranks(Row("fsdp"), 4)),
    pytest.param(with_ranks(Row("fsdp"), 4), Row("ddp"), marks=LONG),
    pytest.param(with_ranks(Row("ddp"), 2), with_ranks(Row("fsdp"), 2), marks=LONG),
    pytest.param(with_ranks(Row("zero1"), 2), with_ranks(Row("hsdp"), 4), marks=LONG),
    (with_ranks(Row("hsdp"), 4), with_ranks(Row("zero2"), 2)),
    pytest.param(Row("fsdp"), with_ranks(Row("zero1"), 4), marks=LONG),
]


@pytest.mark.parametrize(("first", "second"), SECOND_HALVES, ids=str)
def test_another_plan_goes_on_with_the_same_curve(workers, text, tmp_path, uninterrupted, first, second):
    train(workers, first, tmp_path, text, steps=10, stop_at=5)
    rows = train(workers, second, tmp_path, text, steps=10)
    assert_same_curve(rows, uninterrupted)


OPTIMIZERS = [
    pytest.param(Row("ddp", optimizer="sgd"), Row("fsdp", optimizer="sgd"), marks=LONG),
    pytest.param(Row("ddp", optimizer="lion"), Row("fsdp", optimizer="lion"), marks=LONG),
    pytest.param(Row("fsdp", optimizer="muon"), Row("ddp", optimizer="muon"), marks=LONG),
    (Row("zero1", optimizer="adafactor"), Row("hsdp", optimizer="adafactor")),
    (Row("ddp", optimizer="adamw_8bit"), Row("fsdp", optimizer="adamw_8bit")),
    pytest.param(Row("zero2", precision="fp16"), Row("ddp", precision="fp16"), marks=LONG),
    pytest.param(
        Row("ddp", precision="bf16", master_weights="bf16_kahan"),
        Row("fsdp", precision="bf16", master_weights="bf16_kahan"),
        marks=LONG,
    ),
]


@pytest.mark.parametrize(("first", "second"), OPTIMIZERS, ids=str)
def test_every_optimizer_goes_on_under_another_plan(workers, text, tmp_path, references, first, second):
    """Two ranks, then four: what was saved is the same whichever plan reads it."""
    train(workers, with_ranks(first, 2), tmp_path, text, steps=4, stop_at=2)
    rows = train(workers, with_ranks(second, 4), tmp_path, text, steps=4)
    assert_same_curve(rows, references(second.reference()), bounds(second))


MOVES = [Row("ddp"), with_ranks(Row("fsdp"), 2), with_ranks(Row("zero1"), 4), with_ranks(Row("ddp"), 2), Row("fsdp")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_moves_again_and_again(workers, text, tmp_path, uninterrupted, seed):
    """1 -> 2 -> 4 -> 2 -> 1 ranks and as many strategies, at steps drawn from the seed."""
    stops = sorted(random.Random(seed).sample(range(1, 10), len(MOVES) - 1))
    print(f"seed {seed}: moved after steps {stops}")
    for row, stop in zip(MOVES, [*stops, 10], strict=True):
        rows = train(workers, row, tmp_path, text, steps=10, stop_at=stop)
    assert_same_curve(rows, uninterrupted)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=LONG), "fsdp"])
def test_three_ranks_that_cannot_share_the_batch_evenly(workers, text, tmp_path, uninterrupted, parallel):
    """8 sequences over 3 ranks of 3: the last place is filled with a sequence without targets."""
    train(workers, with_ranks(Row("ddp"), 2), tmp_path, text, steps=10, stop_at=4)
    rows = train(workers, with_ranks(Row(parallel), 3, micro_batch=4), tmp_path, text, steps=10)
    assert_same_curve(rows, uninterrupted)
    ours, theirs = ([row["tokens"] for row in each if row["kind"] == "train"] for each in (rows, uninterrupted))
    assert ours == theirs


def test_without_the_checkpoint_the_metrics_begin_again(workers, text, tmp_path, uninterrupted):
    """The resume tests can fail: a run whose checkpoints are gone starts over and cuts its own rows."""
    train(workers, Row(), tmp_path, text, steps=10, stop_at=5)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    rows = train(workers, Row(), tmp_path, text, steps=10, stop_at=2)
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
