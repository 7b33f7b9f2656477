"""Training in float8, with products emulated on the CPU: sharded or not, resumed, and read back by a run in bf16."""

from dataclasses import replace

import pytest

from tests.parity.training import EXACT, Row, difference, hashes, prepare, read_rows, tensors_of, train_rank, with_ranks

pytest.importorskip("torchao")
pytestmark = [pytest.mark.dist, pytest.mark.slow]
# Scales follow the largest value of a microbatch, so the rounding depends on how the batch is divided.
LOSS, NORM = 2e-2, 1e-1


def train_in_float8(workers, row, folder, text, stop_at=None, float8=True):
    path, plan = prepare(row, folder, text, 6)
    plan = replace(plan, precision=replace(plan.precision, float8=float8))
    for stop in (stop_at, None) if stop_at else (None,):
        workers.run(train_rank, plan.world_size, str(path), plan, stop, "")
    return read_rows(folder / "run")


def test_the_loss_curve_is_close_to_that_in_bf16_under_every_plan(workers, text, tmp_path):
    row = Row(precision="bf16")
    plain = train_in_float8(workers, row, tmp_path / "bf16", text, float8=False)
    single = train_in_float8(workers, row, tmp_path / "one", text)
    sharded = train_in_float8(workers, with_ranks(replace(row, parallel="fsdp"), 2), tmp_path / "two", text)
    for rows in (single, sharded):
        loss, norm = difference(rows, plain)
        assert 0 < loss < LOSS and 0 < norm < NORM
        assert hashes(rows) == hashes(plain)
    weights = [tensors_of(tmp_path / name / "run", 6) for name in ("bf16", "two")]
    assert weights[0].keys() == weights[1].keys()


def test_a_resumed_run_equals_an_uninterrupted_one(workers, text, tmp_path):
    row = with_ranks(Row("fsdp", precision="bf16"), 2)
    whole = train_in_float8(workers, row, tmp_path / "whole", text)
    parts = train_in_float8(workers, row, tmp_path / "parts", text, stop_at=3)
    exact = [[[each[key] for key in EXACT] for each in rows if each["kind"] == "train"] for rows in (parts, whole)]
    assert exact[0] == exact[1]
