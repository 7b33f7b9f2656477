"""Batches of a source of one's own, with extra tensors, are the same under every plan and after a resume."""

import pytest

from tests.cases import slow
from tests.parity.training import EXACT, LOSS, NORM, Row, assert_same_curve, equal_tensors, tensors_of, train

pytestmark = pytest.mark.dist

STEPS = 4
OWN = {
    "data": {"source": "tests.parity.weighted:Weighted"},
    "objective": {"name": "tests.parity.weighted:WeightedLoss"},
}
KEPT = {**OWN, "checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    """Four steps on one process, and their folder."""
    folder = tmp_path_factory.mktemp("alone")
    return train(workers, Row(micro_batch=8, changes=KEPT), folder, text, STEPS), folder


@pytest.mark.parametrize(
    ("parallel", "ranks", "micro"),
    [
        ("fsdp", 2, 2), ({"cp": 2}, 2, 4), slow("ddp", 2, 4), slow("ddp", 3, 3), slow({"tp": 2}, 2, 8),
        slow({"pp": 2}, 2, 2), slow({"dp_shard": 2, "cp": 2}, 4, 2),
    ],
)  # fmt: skip
def test_every_plan_feeds_the_same_weights(workers, text, tmp_path, alone, parallel, ranks, micro):
    row = Row(parallel, ranks, micro, changes=OWN)
    rows = train(workers, row, tmp_path, text, STEPS)
    assert_same_curve(rows, alone[0], (4 * LOSS, NORM))  # the weights multiply the loss by up to 4


def test_a_resumed_run_is_the_same_bit_for_bit(workers, text, tmp_path, alone):
    row = Row(micro_batch=8, changes=KEPT)
    train(workers, row, tmp_path, text, STEPS, stop_at=2)
    rows = train(workers, row, tmp_path, text, STEPS)
    ours, theirs = (
        [tuple(row[key] for key in EXACT) for row in each if row["kind"] == "train"] for each in (rows, alone[0])
    )
    assert ours == theirs
    assert equal_tensors(*(tensors_of(folder / "run", STEPS) for folder in (tmp_path, alone[1])))
