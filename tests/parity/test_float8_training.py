"""Training in float8, with products emulated on the CPU: sharded or not, resumed, and read back by a run in bf16."""

import json
from dataclasses import replace

import pytest
import torch

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


def count_layer_weights(folder):
    config = json.loads((folder / "run" / "model" / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = config["num_key_value_heads"] * config["head_dim"]
    return config["num_hidden_layers"] * (2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * inner)


def test_shards_are_gathered_in_float8(workers, text, tmp_path):
    """Each rank sends its half of every layer's matrices twice per step: one byte less for each number."""
    row = with_ranks(Row("fsdp", precision="bf16"), 2)
    sent = {}
    for name, float8 in (("bf16", False), ("float8", True)):
        rows = train_in_float8(workers, row, tmp_path / name, text, float8=float8)
        sent[name] = [each["sent_bytes"] for each in rows if each["kind"] == "train"][1:]
    saved = count_layer_weights(tmp_path / "float8")
    for wide, narrow in zip(sent["bf16"], sent["float8"], strict=True):
        assert wide - narrow == pytest.approx(saved, rel=0.02)  # and the scales, a number for each matrix


@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit", "adafactor"])
def test_optimizers_update_weights_that_are_gathered_in_float8(workers, text, tmp_path, optimizer):
    row = Row(precision="bf16", optimizer=optimizer)
    single = train_in_float8(workers, row, tmp_path / "one", text)
    sharded = train_in_float8(workers, with_ranks(replace(row, parallel="fsdp"), 2), tmp_path / "two", text)
    loss, norm = difference(sharded, single)
    assert loss < LOSS and norm < NORM


def test_one_process_in_bf16_goes_on_from_shards_that_were_gathered_in_float8(workers, text, tmp_path):
    path, plan = prepare(with_ranks(Row("fsdp", precision="bf16"), 2), tmp_path, text, 6)
    rounded = replace(plan, precision=replace(plan.precision, float8=True))
    workers.run(train_rank, 2, str(path), rounded, 3, "")
    saved = tensors_of(tmp_path / "run", 3)
    assert all(type(tensor) is torch.Tensor for tensor in saved.values())
    alone = replace(plan, strategy="ddp", dp_shard=1, reshard_after_forward=False, reduce_gradients="last",
                    num_microbatches=2 * plan.num_microbatches)  # fmt: skip
    workers.run(train_rank, 1, str(path), alone, None, "")
    assert [each["step"] for each in read_rows(tmp_path / "run") if each["kind"] == "train"] == list(range(1, 7))
