"""Compressed gradients equal the papers' algorithms, send the bytes that are documented, and survive bad steps."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.learn.reduction import build_reducer
from echelon.planner.plan import SyncPlan
from echelon.planner.replica_costs import count_sent_bytes as expect_bytes
from tests.cases import slow
from tests.parity.compression_oracle import FRACTION, ORACLES, RANK, SEED
from tests.parity.training import EXACT, Row, equal_tensors, tensors_of, train, with_ranks
from traffic import count_sent_bytes, read_sent_bytes

pytestmark = pytest.mark.dist

METHODS = list(ORACLES)
STEPS = 20


def plan_of(method):
    numbers = {"powersgd": {"rank": RANK}, "topk": {"fraction": FRACTION}, "randomk": {"fraction": FRACTION}}
    return SyncPlan(method=method, **numbers.get(method, {}))


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 8))


def loss_of(model, worker, size, step):
    inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * step + worker))
    return (model(inputs) - torch.sin(3 * inputs[:, :8])).square().sum() / (16 * size)


def gradients_of(model, loss):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def descend(model, gradients):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 0.05 * gradients[name]


def train_toy(rank, world_size, method, bad_step=None):
    """The losses of this rank, over steps whose gradients come in two buckets.

    bad_step: is not applied, because a gradient of the last rank is not a number: none is finite on any rank, in the
    bucket with it.
    """
    model = small_model()
    reducer = build_reducer(plan_of(method), dict(model.named_parameters()), dist.group.WORLD, SEED)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, rank, world_size, step)
        losses.append(loss.item())
        gradients = gradients_of(model, loss)
        names = list(gradients)
        if step == bad_step and rank == world_size - 1:
            gradients[names[-1]][1] = torch.nan
        for bucket in (names[3:], names[:3]):
            reducer.reduce(step, {name: gradients[name] for name in bucket})
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        assert norm.isfinite() == (step != bad_step)
        reducer.settle(norm.isfinite())
        if norm.isfinite():
            descend(model, gradients)
    return losses


def train_oracle(method, size, bad_step=None):
    model, state, losses = small_model(), {}, []
    for step in range(STEPS):
        each = [loss_of(model, worker, size, step) for worker in range(size)]
        losses.append([loss.item() for loss in each])
        if step == bad_step:
            continue
        workers = [gradients_of(model, loss) for loss in each]
        if method == "int8":  # blocks end with a bucket
            names = list(workers[0])
            parts = [[{name: worker[name] for name in part} for worker in workers] for part in (names[3:], names[:3])]
            sums = {name: value for part in parts for name, value in ORACLES[method](step, part, state).items()}
        else:
            sums = ORACLES[method](step, workers, state)
        descend(model, sums)
    return [list(losses_of_worker) for losses_of_worker in zip(*losses, strict=True)]


@pytest.mark.parametrize("ranks", [2, slow(4)])
@pytest.mark.parametrize("method", METHODS)
def test_losses_are_those_of_the_papers_algorithm(workers, method, ranks):
    """In bf16 a difference of one rounding is 2^-9 of a value; in the others sums may be added in another order."""
    found, expected = workers.run(train_toy, ranks, method), train_oracle(method, ranks)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance_of(method))


def tolerance_of(method):
    return 1e-4 if method in ("bf16", "fp16", "int8") else 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_step_reaches_every_rank_and_leaves_no_trace(workers, method):
    found, expected = workers.run(train_toy, 2, method, 5), train_oracle(method, 2, bad_step=5)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance_of(method))


SIZES = {"weight": (2048, 1024), "bias": (2048,)}


def count_bytes(rank, world_size, method):
    """What this rank's sockets send for one sum."""
    tensors = {name: torch.randn(size) for name, size in SIZES.items()}
    reducer = build_reducer(plan_of(method), tensors, dist.group.WORLD, SEED)
    reducer.reduce(0, tensors)  # connections are there
    dist.barrier()
    sent = read_sent_bytes()
    reducer.reduce(1, tensors)
    dist.barrier()
    return count_sent_bytes(sent)


def count_sent_bytes_of(method, ranks):
    """The planner's formula, which is the table of docs/gradient-compression.md, with two of its rows by hand."""
    formula = expect_bytes(plan_of(method), list(SIZES.values()), ranks)
    matrix, vector = 2048 * 1024, 2048
    by_hand = {
        "powersgd": 2 * (1 - 1 / ranks) * 4 * (RANK * (2048 + 1024) + vector),
        "topk": (ranks - 1) * 8 * FRACTION * (matrix + vector),
    }
    assert formula == pytest.approx(by_hand.get(method, formula))
    return formula


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a socket")
@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_sockets_send_what_the_table_says(workers, ranks):
    for method in METHODS:
        found = workers.run(count_bytes, ranks, method)
        assert sum(found) / ranks == pytest.approx(count_sent_bytes_of(method, ranks), rel=0.15), method


def compressed(method, ranks=2, parallel="ddp", **numbers):
    changes = {"sync": {"compress": {"method": method, **numbers}}, "checkpoint": {"every": 4, "async": False}}
    return with_ranks(Row(parallel, changes=changes), ranks, micro_batch=2)


def losses(rows):
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.slow
def test_all_values_are_the_uncompressed_sum(workers, text, tmp_path):
    """DDP's buckets, names and sums: top-k of every value is no compression."""
    plain = train(workers, with_ranks(Row("ddp"), 2, micro_batch=2), tmp_path / "plain", text, steps=6)
    whole = train(workers, compressed("topk", fraction=1.0), tmp_path / "whole", text, steps=6)
    assert losses(whole) == pytest.approx(losses(plain), abs=2e-5)
    part = train(workers, compressed("topk", fraction=0.01), tmp_path / "part", text, steps=6)
    assert losses(part) != pytest.approx(losses(plain), abs=2e-5)


@pytest.mark.parametrize("method", ["powersgd", *(slow(each) for each in ("topk", "randomk", "sign"))])
def test_a_resumed_run_goes_on_with_what_was_not_sent(workers, text, tmp_path, method):
    row = compressed(method)
    ours = train(workers, row, tmp_path / "whole", text, steps=8)
    train(workers, row, tmp_path / "cut", text, steps=8, stop_at=4)
    theirs = train(workers, row, tmp_path / "cut", text, steps=8)
    ours, theirs = ([row for row in rows if row["kind"] == "train"] for rows in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert {key: a[key] for key in EXACT} == {key: b[key] for key in EXACT}
    saved = tensors_of(tmp_path / "whole/run", 8)
    assert equal_tensors(saved, tensors_of(tmp_path / "cut/run", 8))
    residuals = [name for name in saved if name.startswith("rank-0001.residual.")]
    assert any(saved[name].any() for name in residuals)


@pytest.mark.slow
def test_residuals_of_another_number_of_processes_are_dropped_aloud(workers, text, tmp_path):
    train(workers, compressed("topk"), tmp_path, text, steps=8, stop_at=4)
    rows = train(workers, compressed("topk", ranks=4), tmp_path, text, steps=8)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 9))
    saved = tensors_of(tmp_path / "run", 8)
    assert {name[:9] for name in saved if name.startswith("rank-")} == {f"rank-000{rank}" for rank in range(4)}
