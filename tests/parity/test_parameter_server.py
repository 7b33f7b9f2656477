"""Parameter servers: a step that waits for all workers is that of a single process, whoever owns which weights."""

import json

import pytest

from training import (
    EXACT,
    LOSS,
    Row,
    check_exact_resume,
    hashes,
    losses_of,
    tensors_of,
    train,
    weight_difference,
    with_ranks,
)

pytestmark = pytest.mark.dist

STEPS = 20


def served(ranks=2, servers=1, optim=None, every_steps=STEPS, sync=None, **fields):
    """A row of `ranks` workers. `optim`: other keys of the section."""
    changes = {
        "sync": {"name": "parameter_server", "servers": servers, **(sync or {})},
        "optim": {"max_grad_norm": 1.0, **(optim or {})},
        "checkpoint": {"every_steps": every_steps, "async": False},
    }
    return with_ranks(Row("ddp", changes=changes, **fields), ranks, micro_batch=2)


def alone(row):
    """The same training in a single process without servers."""
    reference = row.reference()
    return Row(**{**vars(reference), "changes": {"optim": row.changes["optim"]}})


OPTIMIZERS = {
    "adamw": {"betas": [0.9, 0.95]},
    "sgd": {"momentum": 0.9, "learning_rate": 0.3},
    "lion": {},
    "adafactor": {},
    "muon": {},
}


@pytest.mark.parametrize(
    ("optimizer", "ranks", "servers"),
    [
        ("adamw", 2, 2),
        ("sgd", 3, 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("sgd", 4, 2), ("adamw", 4, 3), ("adamw", 1, 1), ("lion", 2, 2), ("adafactor", 2, 1))
        ),
    ],
)
def test_losses_and_weights_are_those_of_a_single_process(workers, text, tmp_path, optimizer, ranks, servers):
    row = served(ranks, servers, OPTIMIZERS[optimizer], optimizer=optimizer)
    ours = train(workers, row, tmp_path / "servers", text, STEPS)
    theirs = train(workers, alone(row), tmp_path / "alone", text, STEPS)
    assert hashes(ours) == hashes(theirs)
    assert losses_of(ours) == pytest.approx(losses_of(theirs), abs=1e-5)
    norms = ([each["grad_norm"] for each in rows if each["kind"] == "train"] for rows in (ours, theirs))
    assert next(norms) == pytest.approx(next(norms), rel=1e-4)
    assert weight_difference(tmp_path / "servers/run", tmp_path / "alone/run", STEPS) < 2e-5
