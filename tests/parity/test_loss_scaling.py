"""fp16 on real ranks: an overflow costs a step and no more, until it cannot be an overflow."""

from unittest import mock

import pytest

import echelon.learn.engines.native as native
import echelon.learn.optimizer.norm as loss_scale
from tests.parity.training import (
    PlantedWorkers,
    Row,
    difference,
    hashes,
    raised_in_training,
    read_rows,
    train,
    with_ranks,
)

pytestmark = pytest.mark.dist


def train_from(rank, world_size, path, plan, stop_at, initial, is_broken):
    """Train with another initial loss scale, with a norm that is never finite if asked; what it raised."""
    global_norm = native.global_norm

    def broken(gradients, stages):
        return global_norm(gradients, stages) * float("nan")

    with (
        mock.patch.object(loss_scale, "INITIAL", initial),
        mock.patch.object(native, "global_norm", broken if is_broken else global_norm),
    ):
        return raised_in_training(rank, world_size, path, plan, stop_at)


def plant(pool, initial, is_broken=False):
    return PlantedWorkers(pool, train_from, initial, is_broken)


@pytest.mark.parametrize("row", [with_ranks(Row(name, precision="fp16"), 2) for name in ("ddp", "fsdp")], ids=str)
def test_an_overflow_is_skipped_and_training_goes_on(workers, references, text, tmp_path, row):
    pool = plant(workers, initial=2.0**28)
    rows = [each for each in train(pool, row, tmp_path, text, steps=14) if each["kind"] == "train"]
    assert pool.raised == [None, None]
    skipped = [each["skipped"] for each in rows]
    count = skipped.index(False)
    assert count >= 2 and sum(skipped) < 14, "it halves until it fits"
    assert [each["loss_scale"] for each in rows] == [2.0 ** (28 - sum(skipped[:index])) for index in range(14)]
    # A skipped step has its number, its batch and its loss; the loss after it is that of the same weights.
    expected = train(workers, row.reference(), tmp_path / "fp32", text, steps=14)
    assert hashes(rows) == hashes(expected)
    assert [each["step"] for each in rows] == list(range(1, 15))
    assert all(each["grad_norm"] is None for each in rows[:count])
    assert rows[0]["loss"] == pytest.approx(expected[0]["loss"], abs=2e-3)
    assert 0.1 < rows[count]["grad_norm"] < 10, "the norm is of gradients without the scale"
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.02


def test_what_no_scale_mends_stops_the_run(workers, text, tmp_path):
    pool = plant(workers, initial=4.0, is_broken=True)
    train(pool, with_ranks(Row("ddp", precision="fp16"), 2), tmp_path, text, steps=12)
    assert all("step 4: " in message and "both must be finite" in message for message in pool.raised)
    rows = read_rows(tmp_path / "run")
    assert [(each["loss_scale"], each["skipped"]) for each in rows] == [
        (4.0, True), (2.0, True), (1.0, True), (0.5, True)
    ]  # fmt: skip


def test_fp16_is_nearer_to_fp32_than_bf16_is(workers, references, text, tmp_path):
    """Ten bits of a fraction against seven: a check that fp16 is what ran."""
    far = {}
    for precision in ("fp16", "bf16"):
        row = Row(precision=precision)
        far[precision], _ = difference(train(workers, row, tmp_path / precision, text), references(row.reference()))
    assert 0 < far["fp16"] < far["bf16"]
