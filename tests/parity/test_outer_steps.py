"""Local SGD and DiLoCo equal two loops in plain torch, around any strategy, and go on bit for bit."""

import json
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.cases import slow
from tests.parity import training
from tests.parity.outer_oracle import train_outer_oracle
from tests.parity.stand_ins import train_rank_with
from tests.parity.test_bad_steps import poison
from tests.parity.test_compression import losses

pytestmark = pytest.mark.dist

STEPS = 20
PLAIN = {"weight_decay": 0.0, "betas": [0.9, 0.95], "max_grad_norm": 1.0}


def apart(name="diloco", parallel="ddp", ranks=2, every_steps=4, **sync):
    """A row of replicas that agree every 5 steps unless `sync` says otherwise."""
    changes = {
        "sync": {"name": name, "every": 5, **sync}, "optim": PLAIN,
        "checkpoint": {"every": every_steps, "async": False},
    }  # fmt: skip
    return training.with_ranks(training.Row(parallel, changes=changes), ranks, micro_batch=2)


def oracle(workers, text, folder, replicas=2, every=5, outer_rate=0.7, momentum=0.9, overlap=False, bad=None):
    path, plan = training.prepare(training.Row(changes={"optim": PLAIN}), folder, text, STEPS)
    arguments = (replicas, every, outer_rate, momentum, overlap, bad)
    return workers.run(train_outer_oracle, 1, str(path), plan, *arguments)[0]


@pytest.fixture(scope="module")
def diloco(workers, text, tmp_path_factory):
    """The losses and final weights of the oracle for two replicas."""
    return oracle(workers, text, tmp_path_factory.mktemp("oracle"))


def check(workers, text, folder, row, expected):
    found = losses(training.train(workers, row, folder, text, STEPS))
    theirs, weights = expected
    assert found == pytest.approx(theirs, abs=1e-5)
    saved = training.tensors_of(folder / "run", STEPS)
    for name, weight in weights.items():
        assert torch.allclose(saved[f"model.{name}"], weight, atol=2e-5), name
    ours, others = (saved[f"replica-000{k}.model.lm_head.weight"] for k in range(2))
    assert torch.equal(ours, others) and torch.equal(ours, saved["model.lm_head.weight"]), "the last step agrees"
    return saved


@pytest.mark.parametrize(
    ("parallel", "ranks"), [("ddp", 2), *(slow(*each) for each in (("ddp", 4), ("fsdp", 4), ({"tp": 2}, 4)))], ids=str
)
def test_diloco_is_two_loops(workers, text, tmp_path, diloco, parallel, ranks):
    check(workers, text, tmp_path, apart(parallel=parallel, ranks=ranks), diloco)


@pytest.mark.slow
def test_local_sgd_takes_the_mean(workers, text, tmp_path):
    expected = oracle(workers, text, tmp_path / "oracle", outer_rate=1.0, momentum=0.0)
    check(workers, text, tmp_path / "run", apart("local_sgd"), expected)


@pytest.mark.slow
def test_agreeing_after_every_step_is_averaging(workers, text, tmp_path):
    """With H = 1, outer SGD and the rate 1 the agreed weights are the mean after every step."""
    expected = oracle(workers, text, tmp_path / "oracle", every=1, outer_rate=1.0, momentum=0.0)
    check(workers, text, tmp_path / "run", apart("local_sgd", every=1), expected)


@pytest.mark.slow
def test_overlapped_outer_gradients_are_one_step_late(workers, text, tmp_path):
    expected = oracle(workers, text, tmp_path / "oracle", overlap=True)
    check(workers, text, tmp_path / "run", apart(overlap=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bf16", "int8"])
def test_rounded_outer_gradients_are_close(workers, text, tmp_path, diloco, method):
    found = losses(training.train(workers, apart(compress={"method": method}), tmp_path, text, STEPS))
    assert found == pytest.approx(diloco[0], abs=2e-3) and found != pytest.approx(diloco[0], abs=1e-7)


def same_rows(ours, theirs):
    ours, theirs = ([row for row in rows if row["kind"] == "train"] for rows in (ours, theirs))
    return [[row[key] for key in training.EXACT] for row in ours] == [
        [row[key] for key in training.EXACT] for row in theirs
    ]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(apart(), id="diloco"),
        pytest.param(apart(overlap=True, every=4), id="overlap", marks=pytest.mark.slow),
        *(
            pytest.param(replace(apart(**given), **fields), id=name, marks=pytest.mark.slow)
            for name, given, fields in (
                ("fsdp", {"parallel": "fsdp", "ranks": 4}, {}),
                ("pp", {"parallel": {"pp": 2}, "ranks": 4}, {}),
                ("lora", {}, {"adapter": "lora"}),
                ("fp16", {}, {"precision": "fp16"}),
            )
        ),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(workers, text, tmp_path, row):
    """After step 4 replicas are apart, or the outer gradients of step 4 are on their way."""
    whole = training.train(workers, row, tmp_path / "whole", text, steps=8)
    training.train(workers, row, tmp_path / "cut", text, steps=8, stop_at=4)
    assert same_rows(whole, training.train(workers, row, tmp_path / "cut", text, steps=8))
    assert training.equal_tensors(*(training.tensors_of(tmp_path / each / "run", 8) for each in ("whole", "cut")))


@pytest.mark.slow
def test_a_signal_between_agreements_stops_all_replicas(workers, text, tmp_path):
    runs = {name: training.prepare(apart(), tmp_path / name, text, 8) for name in ("whole", "cut")}

    def go(name, interruption=None):
        path, plan = runs[name]
        return workers.run(train_rank_with, 2, str(path), plan, "native", "diloco", interruption)

    assert [error for error, _ in go("whole")] == [None, None]
    assert all(error.startswith("stopped by SIGTERM at step ") for error, _ in go("cut", (2, signal.SIGTERM)))
    assert [error for error, _ in go("cut")] == [None, None]
    assert same_rows(*(training.read_rows(tmp_path / name / "run") for name in runs))
    assert training.equal_tensors(*(training.tensors_of(tmp_path / name / "run", 8) for name in runs))


def train_poisoned(rank, world_size, path, plan, step):
    """A run in which the gradients of the last rank are not numbers in a step, counted from 1."""
    with poison({str(step): torch.nan}) if rank == world_size - 1 else nullcontext():
        training.train_rank(rank, world_size, path, plan, None, "")


def train_with_bad_step(workers, text, folder, action, step):
    row = apart()
    row.changes["fault"] = {"on_bad_step": action}
    path, plan = training.prepare(row, folder, text, STEPS)
    workers.run(train_poisoned, 2, str(path), plan, step)
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    rows = [row for row in training.read_rows(folder / "run") if row["kind"] == "train"]
    return rows, [(event["event"], event["step"]) for event in events if event["event"] in ("bad_step", "rollback")]


@pytest.mark.slow
def test_a_replica_skips_a_bad_step_and_the_others_go_on(workers, text, tmp_path):
    rows, events = train_with_bad_step(workers, text, tmp_path / "run", "skip", 7)
    assert events == [("bad_step", 7)] and [row["step"] for row in rows if row["skipped"]] == [7]
    expected, _ = oracle(workers, text, tmp_path / "oracle", bad=(1, 6))
    assert losses(rows) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_all_replicas_go_back_from_a_bad_step_of_one(workers, text, tmp_path):
    rows, events = train_with_bad_step(workers, text, tmp_path, "rollback", 7)
    assert events == [("bad_step", 7), ("rollback", 4)]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if row["skipped"]] == [7], "no replica applies it"


@pytest.mark.slow
def test_another_number_of_replicas_goes_on(workers, text, tmp_path):
    """Each takes the state of a replica before."""
    training.train(workers, apart(), tmp_path, text, steps=8, stop_at=4)
    before = training.tensors_of(tmp_path / "run", 4)
    rows = training.train(workers, apart(ranks=4, replicas=4), tmp_path, text, steps=8)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 9))
    after = training.tensors_of(tmp_path / "run", 8)
    assert before.keys() < after.keys() and {name[:12] for name in after} >= {f"replica-000{k}" for k in range(4)}
