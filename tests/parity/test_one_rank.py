"""A strategy that shards computes on one rank what it computes on several, in bf16 as well."""

import pytest

from tests.parity.training import HALF_LOSS, HALF_NORM, LOSS, NORM, Row, difference, hashes, train, with_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("row", "loss", "norm"),
    [
        (Row("zero2", micro_batch=2, precision="bf16"), HALF_LOSS, HALF_NORM),
        (Row("zero1", micro_batch=2, tied=True), LOSS, NORM),
        (Row("fsdp", micro_batch=2, family="gpt2"), LOSS, NORM),
    ],
    ids=str,
)
def test_one_rank_equals_two_and_the_plain_process(workers, text, tmp_path, row, loss, norm):
    alone = train(workers, row, tmp_path / "one", text)
    both = train(workers, with_ranks(row, 2), tmp_path / "two", text)
    plain = train(workers, row.reference(), tmp_path / "plain", text)
    for rows in (both, plain):
        found = difference(alone, rows)
        assert found[0] < loss and found[1] < norm and hashes(alone) == hashes(rows)
