"""Asynchronous parameter servers: losses are those of the recorded pulls and pushes, done again one by one."""

import shutil
import signal
import threading
import time

import pytest
import torch

from echelon.learn.distributed.torch_internals import close_connections
from echelon.learn.sync.pushes import Kind, receive
from echelon.run.supervise.outcome import is_secondary
from tests.parity.push_oracle import replay
from tests.parity.stand_ins import train_rank_with
from tests.parity.test_parameter_server import STEPS, alone, served, train_poisoned
from tests.parity.training import hashes, losses_of, masked_trainer, prepare, read_rows, tensors_of, train

pytestmark = pytest.mark.dist


def train_journaled(rank, world_size, path, plan, delays):
    """The journal of this rank's server, and the names that it owns.

    All ranks pull before the first one pushes. `delays`: seconds that a rank sleeps in every share.
    """
    with masked_trainer(rank, world_size, path, plan) as trainer:
        engine, server = trainer.train_step.learner.engine, trainer.train_step.sync.server
        if server is not None:
            server.journal = []
        forward_backward, calls = engine.forward_backward, []

        def slow(*args):
            if not calls:
                torch.distributed.barrier()
            calls.append(args)
            time.sleep(delays[rank])
            return forward_backward(*args)

        engine.forward_backward = slow
        trainer.fit()
        return None if server is None else (server.journal, list(engine.served.parameters))


PLAIN = {"weight_decay": 0.0, "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("ranks", "servers", "staleness", "steps"),
    [
        (2, 1, 2, 4),
        *(
            pytest.param(*each, STEPS, marks=pytest.mark.slow)
            for each in ((3, 1, 1), (3, 2, 3), (4, 3, None), (4, 1, None))
        ),
    ],
)
def test_asynchronous_steps_are_the_recorded_order_done_again(
    workers, text, tmp_path, ranks, servers, staleness, steps
):
    row = served(ranks, servers, optim=PLAIN, max_staleness=staleness)
    path, plan = prepare(row, tmp_path / "servers", text, steps)
    found = workers.run(train_journaled, ranks, str(path), plan, [0.03] + [0.01] * (ranks - 1))
    journals, parts = zip(*(each for each in found if each is not None), strict=True)
    assert len(journals) == servers
    for journal in journals:
        updates = [event[1:] for event in journal if event[0] == Kind.UPDATE]
        assert sorted(updates) == [(step, share) for step in range(steps) for share in range(ranks)], "each share once"
    assert find_staleness(journals[0]) >= ranks - 1, "the last gradient of the first step is of older weights"
    if staleness is not None:
        assert find_spread(journals[0]) <= staleness
    rows = read_rows(tmp_path / "servers/run")
    alone_path, alone_plan = prepare(alone(row), tmp_path / "alone", text, steps)
    theirs = workers.run(replay, 1, str(alone_path), alone_plan, ranks, journals, parts)[0]
    assert losses_of(rows) == pytest.approx(theirs[0], abs=1e-5)
    saved = tensors_of(tmp_path / "servers/run", steps)
    for name, weight in theirs[1].items():
        assert torch.allclose(saved[f"model.{name}"], weight, atol=2e-5), name


@pytest.mark.slow
def test_compensated_gradients_are_those_of_the_paper(workers, text, tmp_path):
    """A factor so large that the compensation shows in the losses."""
    factor = 3e4
    row = served(3, 1, optim=PLAIN, max_staleness=3, staleness_compensation=factor)
    path, plan = prepare(row, tmp_path / "servers", text, STEPS)
    found = workers.run(train_journaled, 3, str(path), plan, [0.03, 0.01, 0.01])
    journals, parts = zip(*(each for each in found if each is not None), strict=True)
    ours = losses_of(read_rows(tmp_path / "servers/run"))
    alone_path, alone_plan = prepare(alone(row), tmp_path / "alone", text, STEPS)
    compensated, plain = (
        workers.run(replay, 1, str(alone_path), alone_plan, 3, journals, parts, each)[0][0] for each in (factor, 0.0)
    )
    assert ours == pytest.approx(compensated, abs=1e-5)
    assert ours != pytest.approx(plain, abs=1e-4)


def end_waits(rank, world_size):
    """Wait for a message of the other rank in a thread; rank 0 ends all waits. Returns the error of this rank's."""
    group = torch.distributed.new_group(backend="gloo")
    errors = []

    def wait():
        try:
            receive(1 - rank, 0, group)
        except RuntimeError as error:
            errors.append(is_secondary(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    if rank == 0:
        time.sleep(0.1)
        close_connections(group)
    thread.join(20)
    return errors


def test_waits_of_all_threads_end_when_connections_are_closed(workers):
    """The errors say that a peer is gone: they are no cause of their own."""
    assert workers.run(end_waits, 2) == [[True], [True]]


def find_staleness(journal):
    """The most updates between the pull of a share and its own update."""
    pulled, count, most = {}, 0, 0
    for kind, *share in journal:
        if kind == Kind.PULL:
            pulled[tuple(share)] = count
        else:
            most = max(most, count - pulled[tuple(share)])
            count += 1
    return most


def find_spread(journal):
    """By how many steps weights were pulled ahead of the earliest share that was not applied yet."""
    open_shares, most = [], 0
    for kind, *share in journal:
        if kind == Kind.PULL:
            open_shares.append(tuple(share))
            most = max(most, share[0] - min(open_shares)[0])
        else:
            open_shares.remove(tuple(share))
    return most


def asynchronous(ranks=3, staleness=2, **changes):
    row = served(ranks, 2, max_staleness=staleness)
    row.changes.update(changes)
    return row


@pytest.mark.slow
def test_pauses_wait_for_all_that_was_pushed(workers, text, tmp_path):
    """A checkpoint has exactly its steps, and a run goes on from it with any plan, in the same order of batches."""
    whole = hashes(train(workers, alone(served()), tmp_path / "alone", text, 8))
    train(workers, asynchronous(), tmp_path / "cut", text, 8, stop_at=4)
    steps = tensors_of(tmp_path / "cut/run", 4)["optimizer.lm_head.weight.step"]
    assert steps.item() == 3 * 4, "one update for each share of four steps"
    for name, row in (("same", asynchronous()), ("other", alone(served()))):
        shutil.copytree(tmp_path / "cut", tmp_path / name)
        assert hashes(train(workers, row, tmp_path / name, text, 8)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_bad_share_is_not_pushed(workers, text, tmp_path, action):
    row = asynchronous(fault={"on_bad_step": action})
    path, plan = prepare(row, tmp_path, text, 12)
    workers.run(train_poisoned, plan.world_size, str(path), plan, 6)
    rows = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row["skipped"]] == [6]
    saved = tensors_of(tmp_path / "run", 12)
    assert all(torch.isfinite(each).all() for each in saved.values())


@pytest.mark.slow
def test_a_signal_stops_all_workers_at_one_step(workers, text, tmp_path):
    path, plan = prepare(asynchronous(), tmp_path, text, 12)

    def go(interruption=None):
        return workers.run(train_rank_with, 3, str(path), plan, "native", "parameter_server", interruption)

    errors = [error for error, _ in go((2, signal.SIGTERM))]
    assert len(set(errors)) == 1 and errors[0].startswith("stopped by SIGTERM at step ")
    assert [error for error, _ in go()] == [None] * 3
    rows = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 13))
