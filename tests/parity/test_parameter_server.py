"""Parameter servers: a step that waits for all workers is that of a single process, whoever owns which weights."""

import sys

import pytest
import torch

from tests.parity import training
from tests.parity.test_bad_steps import poison
from traffic import TrafficCounter, count_sent_bytes, read_sent_bytes

pytestmark = pytest.mark.dist

STEPS = 20


def served(ranks=2, servers=1, optimizer="adamw", optim=None, **sync):
    """A row of `ranks` workers. `optim`: other keys of the section."""
    changes = {
        "sync": {"name": "parameter_server", "servers": servers, **sync},
        "optim": {"max_grad_norm": 1.0, **(optim or {})},
        "checkpoint": {"every": 4, "async": False},
    }
    return training.with_ranks(training.Row("ddp", optimizer=optimizer, changes=changes), ranks, micro_batch=2)


def alone(row, ranks=1, parallel="ddp"):
    """The same training without servers."""
    changes = {section: row.changes[section] for section in ("optim", "checkpoint")}
    return training.with_ranks(training.Row(parallel, optimizer=row.optimizer, changes=changes), ranks, micro_batch=2)


SGD = {"optimizer": "sgd", "optim": {"momentum": 0.9, "learning_rate": 0.3}}


@pytest.mark.parametrize(
    ("row", "steps"),
    [
        pytest.param(served(2, 2, **SGD), 4, id="short"),
        *(
            pytest.param(row, STEPS, id=name, marks=pytest.mark.slow)
            for name, row in (
                ("adamw", served(2, 2, optim={"betas": [0.9, 0.95]})),
                ("sgd", served(3, 1, **SGD)),
                ("adamw of four", served(4, 3)),
                ("one process", served(1, 1)),
                ("lion", served(2, 2, "lion")),
                ("adafactor", served(2, 1, "adafactor")),
            )
        ),
    ],
)
def test_losses_and_weights_are_those_of_a_single_process(workers, text, tmp_path, row, steps):
    ours = training.train(workers, row, tmp_path / "servers", text, steps)
    theirs = training.train(workers, alone(row), tmp_path / "alone", text, steps)
    assert training.hashes(ours) == training.hashes(theirs)
    assert training.losses_of(ours) == pytest.approx(training.losses_of(theirs), abs=1e-5)
    norms = [[each["grad_norm"] for each in rows if each["kind"] == "train"] for rows in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    differences = training.weight_differences(tmp_path / "servers/run", tmp_path / "alone/run", steps)
    if row.optimizer == "lion":  # steps by the sign of a number, which rounding decides where it is nearly zero
        assert (differences > 1e-5).double().mean() < 1e-4
    else:
        assert differences.max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("optim", [{"name": "muon"}, {"no_decay": [], "weight_decay": 0.3}], ids=str)
def test_a_server_steps_its_part_as_the_whole_model_would_be(workers, text, tmp_path, optim):
    """Muon takes matrices of layers only; weight decay leaves out what the recipe says."""
    row = served(2, 2, optim.get("name", "adamw"), optim)
    ours = training.train(workers, row, tmp_path / "servers", text, 8)
    theirs = training.train(workers, alone(row), tmp_path / "alone", text, 8)
    assert training.losses_of(ours) == pytest.approx(
        training.losses_of(theirs), abs=training.LOSS if "name" not in optim else 1e-4
    )


@pytest.mark.slow
def test_the_mean_and_the_sum_of_workers(workers, text, tmp_path):
    """Without momentum and clipping, a sum is the mean with a learning rate as many times higher."""
    rate = {"momentum": 0.0, "learning_rate": 0.02, "weight_decay": 0.0, "max_grad_norm": None}
    summed = served(2, 1, "sgd", rate, aggregate="sum")
    mean = served(2, 1, "sgd", {**rate, "learning_rate": 0.04}, aggregate="mean")
    weighted = served(2, 1, "sgd", {**rate, "learning_rate": 0.04})
    found = [
        training.losses_of(training.train(workers, row, tmp_path / str(number), text, 8))
        for number, row in enumerate((summed, mean, weighted))
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[1] != pytest.approx(found[2], abs=1e-5), "the workers have different numbers of targets"


def test_a_resumed_run_goes_on_bit_for_bit(workers, text, tmp_path):
    training.check_exact_resume(
        lambda *args, **kw: training.train(workers, served(2, 2), *args, **kw), tmp_path, text, 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("others", [("ddp", 1), ("fsdp", 2)], ids=str)
def test_other_plans_load_its_checkpoints_and_the_other_way_round(workers, text, tmp_path, others):
    row = served(2, 2)
    plain = alone(row, others[1], others[0])
    whole = training.losses_of(training.train(workers, alone(row), tmp_path / "whole", text, 8))
    for name, first, second in (("from", row, plain), ("to", plain, row)):
        training.train(workers, first, tmp_path / name, text, 8, stop_at=4)
        assert training.losses_of(training.train(workers, second, tmp_path / name, text, 8)) == pytest.approx(
            whole, abs=training.LOSS
        )
        assert training.weight_difference(tmp_path / name / "run", tmp_path / "whole/run", 8) < 2e-5


def train_poisoned(rank, world_size, path, plan, step):
    """A run in which the gradients of every rank are not numbers in a step, counted from 1."""
    with poison({str(step): torch.nan}):
        training.train_rank(rank, world_size, path, plan, None, "")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_bad_step_is_applied_by_no_server(workers, text, tmp_path, action):
    runs = []
    for name, row in (("servers", served(2, 2)), ("alone", alone(served()))):
        row.changes["fault"] = {"on_bad_step": action}
        path, plan = training.prepare(row, tmp_path / name, text, 8)
        workers.run(train_poisoned, plan.world_size, str(path), plan, 6)
        runs.append(training.read_rows(tmp_path / name / "run"))
    ours, theirs = runs
    assert [row["step"] for row in ours if row.get("skipped")] == [6]
    assert training.losses_of(ours) == pytest.approx(training.losses_of(theirs), abs=training.LOSS)


def count_bytes(rank, world_size, path, plan, steps):
    """The bytes of all-reduces of this rank, those its sockets sent, what its server counted, and its numbers."""
    with training.masked_trainer(rank, world_size, path, plan) as trainer:
        step_of = trainer.train_step
        pending = [step_of(0)]
        torch.distributed.barrier()  # every worker has its reply
        before = read_sent_bytes()
        server = getattr(step_of.sync, "server", None)
        counted = (0, 0) if server is None else (server.num_received, server.num_sent)
        with TrafficCounter() as counter:
            pending += [step_of(step) for step in range(1, 1 + steps)]
        for each in pending:
            each.read()
        torch.distributed.barrier()
        sent = count_sent_bytes(before)
        after = counted if server is None else (server.num_received, server.num_sent)
        with step_of.sync.agreed():
            pass
        served = step_of.learner.engine.served
        owned = 0 if served is None else sum(each.numel() for each in served.parameters.values())
        total = sum(each.numel() for each in step_of.learner.engine.weights().values())
        return counter.bytes["allreduce_"], sent, [b - a for a, b in zip(counted, after, strict=True)], owned, total


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a socket")
def test_workers_push_and_pull_and_all_reduce_no_gradients(workers, text, tmp_path):
    """Each server gets from each other worker one gradient for each of its weights, and sends back the weight."""
    steps, ranks = 2, 3
    path, plan = training.prepare(served(ranks, 2), tmp_path / "servers", text, 4)
    found = workers.run(count_bytes, ranks, str(path), plan, steps)
    total = found[0][-1]
    assert sum(owned for *_, owned, _ in found) == total
    assert max(owned for *_, owned, _ in found) < 0.6 * total, "disjoint parts of about the same size"
    for reduced, sent, (received, replied), owned, _ in found:
        assert received == steps * 4 * owned * (ranks - 1)
        assert replied == pytest.approx(received, abs=100 * steps), "the weights, and the norms"
        assert sent == pytest.approx(steps * 4 * (total - owned) + replied, rel=0.03)
        assert reduced < 0.01 * 4 * total * steps, "targets and metrics alone"
    path, plan = training.prepare(alone(served(), ranks), tmp_path / "ddp", text, 4)
    assert all(reduced > 4 * total * steps for reduced, *_ in workers.run(count_bytes, ranks, str(path), plan, steps))
