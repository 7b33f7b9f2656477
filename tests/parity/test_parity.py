"""Every plan against the single process: the same losses, the same gradient norms, the same batches.

The rows here are a covering array: every pair of options stands in at least one row. `make test` leaves out those that
take longest; `make parity` runs all of them, and the product.
"""

import shutil
import time

import pytest

from tests.cases import slow
from tests.parity.parity_rows import COVERING, FULL, OPTIMIZERS, PRECISIONS, TILED
from tests.parity.published_rows import Difference
from tests.parity.training import (
    LOSS,
    Row,
    assert_same_curve,
    bounds,
    difference,
    hashes,
    losses_of,
    train,
    weight_difference,
    with_ranks,
)

pytestmark = pytest.mark.dist


def with_marks(rows):
    """The rows; slow are the compiled ones except of DDP, four ranks except FSDP and HSDP with AdamW or Muon, and rules
    of one number each where nothing is sharded."""
    for row in rows:
        is_compiled = row.compile and (row.parallel, row.ranks) != ("ddp", 2)
        is_sharded = row.parallel in ("fsdp", "hsdp") and row.optimizer in ("adamw", "muon") and row.precision != "fp16"
        is_like_two = row.ranks == 4 and not is_sharded
        is_plain = row.optimizer in ("lion", "sgd") and row.parallel in ("ddp", "zero2") and row.precision == "fp32"
        is_slow = is_compiled or is_like_two or is_plain
        yield pytest.param(row, marks=pytest.mark.slow if is_slow else ())


def check(workers, references, text, folder, row, publish=None):
    """Compare a row with its reference, and return the rows of metrics.jsonl of both."""
    started = time.monotonic()
    rows = train(workers, row, folder, text)
    expected = references(row.reference())
    losses, norms = difference(rows, expected)
    loss_bound, norm_bound = bounds(row)
    within = losses <= loss_bound and norms <= norm_bound
    evaluations = [[each["loss"] for each in run if each["kind"] == "eval"] for run in (rows, expected)]
    same = hashes(rows) == hashes(expected) and evaluations[0] == pytest.approx(evaluations[1], abs=loss_bound)
    if publish is not None:
        share = max(abs(ours / theirs - 1) for ours, theirs in zip(losses_of(rows), losses_of(expected), strict=True))
        weights = weight_difference(folder / "run", references.folder(row.reference()) / "run", step=len(hashes(rows)))
        seconds = time.monotonic() - started
        publish(row, Difference(losses, share, norms, weights), within and same, seconds)
        shutil.rmtree(folder)  # the checkpoints of the whole product would fill a disk
    assert within, f"{row}: loss {losses:.1e}, norm {norms:.1e}"
    assert hashes(rows) == hashes(expected)
    assert same, evaluations
    return rows, expected


@pytest.mark.parametrize("row", with_marks(COVERING), ids=str)
def test_equals_one_process(workers, references, text, tmp_path, publish, row):
    check(workers, references, text, tmp_path, row, publish)


@pytest.mark.parametrize("row", with_marks(OPTIMIZERS + PRECISIONS + TILED), ids=str)
def test_every_optimizer_and_precision_equals_one_process(workers, references, text, tmp_path, publish, row):
    check(workers, references, text, tmp_path, row, publish)


@pytest.mark.slow
@pytest.mark.parametrize("row", FULL, ids=str)
def test_equals_one_process_whole_product(workers, references, text, tmp_path, publish, row):
    check(workers, references, text, tmp_path, row, publish)


def test_what_is_published_is_what_was_measured(workers, references, text, tmp_path):
    row, kept = with_ranks(Row(), ranks=2), []
    check(workers, references, text, tmp_path / "right", row, lambda *measured: kept.append(measured))
    [(_, right, equal, _)] = kept
    assert equal and 0 < right.weight < 1e-4 and right.loss <= LOSS and right.loss_share < right.loss
    train(workers, row, tmp_path / "wrong", text, mutation="wrong sample")
    wrong = weight_difference(tmp_path / "wrong" / "run", references.folder(row.reference()) / "run", step=4)
    assert wrong > 100 * right.weight


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("mutation", ["local count", "average again"])
def test_a_planted_mistake_turns_rows_red(workers, references, text, tmp_path, parallel, mutation):
    row = with_ranks(Row(parallel=parallel), ranks=2)
    losses, norms = difference(train(workers, row, tmp_path, text, mutation=mutation), references(row.reference()))
    assert losses > bounds(row)[0] or norms > bounds(row)[1]


@pytest.mark.parametrize("parallel", [{"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_ranks_that_read_the_same_are_counted_once(workers, references, text, tmp_path, parallel):
    row = Row(parallel, ranks=4, micro_batch=4)
    rows, expected = train(workers, row, tmp_path, text), references(row.reference())
    assert_same_curve(rows, expected)
    for key in ("tokens", "target_tokens"):
        assert [each.get(key) for each in rows] == [each.get(key) for each in expected]


WRONG_HASHES = [
    (Row({"tp": 2}, ranks=2), "peer counted twice"),
    slow(Row({"pp": 2}, ranks=2, micro_batch=2), "peer counted twice"),
    slow(Row({"cp": 2}, ranks=2), "peer counted twice"),
    (with_ranks(Row(), ranks=2), "wrong sample"),
]


@pytest.mark.parametrize(("row", "mutation"), WRONG_HASHES, ids=str)
def test_a_wrong_sample_and_a_peer_counted_twice_turn_the_batch_hash_red(
    workers, references, text, tmp_path, row, mutation
):
    rows = train(workers, row, tmp_path, text, mutation=mutation)
    assert all(ours != right for ours, right in zip(hashes(rows), hashes(references(row.reference())), strict=True))


@pytest.mark.parametrize(("optimizer", "mutation"), [("muon", "local matrices"), ("adafactor", "local statistics")])
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_a_rule_of_whole_matrices_on_parts_turns_rows_red(
    workers, references, text, tmp_path, parallel, optimizer, mutation
):
    row = with_ranks(Row(parallel=parallel, optimizer=optimizer), ranks=2)
    losses, _ = difference(train(workers, row, tmp_path, text, mutation=mutation), references(row.reference()))
    assert losses > bounds(row)[0]
