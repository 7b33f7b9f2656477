"""The width of microbatches, and that it changes nothing else."""

import numpy as np
import pytest

from echelon.learn.data.loader import BatchLoader, BatchPlace, Padding, set_width
from echelon.learn.data.order import SampleOrder
from echelon.learn.data.shards import NO_LABEL, Samples
from echelon.recipe.batches import constant_batch

LENGTHS = [3, 9, 17, 30]


def packed(width=30):
    """Rows of these lengths, padded at the end."""
    places = np.arange(width)
    filled = np.array([places < length for length in LENGTHS])
    labels = np.where(filled, 7, NO_LABEL).astype(np.int64)
    return Samples(np.where(filled, 5, 0).astype(np.int64), labels, np.where(filled, 0, -1).astype(np.int32), True)


class Packed:
    """A dataset of those rows."""

    num_samples, num_tokens = len(LENGTHS), sum(LENGTHS)

    def read_samples(self, ids):
        rows = packed()
        return Samples(rows.inputs[ids], rows.labels[ids], rows.documents[ids], True)


@pytest.mark.parametrize(
    ("padding", "rows", "width"),
    [
        (Padding(), [0], 8),
        (Padding(), [1, 2], 24),
        (Padding(), [3], 30),  # at most the available length
        (Padding(multiple=12), [1], 24),
        (Padding(multiple=16), [3], 32),
        (Padding(is_equal=True), [0], 30),
        (Padding(is_equal=True, multiple=16), [0], 32),
    ],
)
def test_width_of_sequences_with_padding(padding, rows, width):
    samples = set_width(packed(), np.array(rows), padding)
    assert samples.inputs.shape == samples.labels.shape == samples.documents.shape == (len(rows), width)
    for row, length in enumerate(LENGTHS[each] for each in rows):
        assert (samples.labels[row] != NO_LABEL).nonzero()[0].tolist() == list(range(length))
        assert (samples.documents[row] >= 0).sum() == length and (samples.inputs[row] == 5).sum() == length


@pytest.mark.parametrize(("length", "width"), [(200, 200), (473, 480), (481, 512), (505, 512)])
def test_sequences_that_are_nearly_full_keep_their_width(length, width):
    """15 sixteenths of 512 are 480."""
    documents = np.where(np.arange(512) < length, 0, -1).astype(np.int32)[None]
    tokens = np.ones((1, 512), np.int64)
    assert set_width(Samples(tokens, tokens, documents, True)).inputs.shape == (1, width)


@pytest.mark.parametrize(("multiple", "width"), [(1, 30), (8, 32)])
def test_width_of_full_sequences(multiple, width):
    text = Samples(np.ones((2, 30), np.int64), np.ones((2, 30), np.int64))
    samples = set_width(text, padding=Padding(multiple=multiple))
    assert samples.inputs.shape == (2, width) and samples.documents is None
    assert (samples.labels[:, 30:] == NO_LABEL).all() and (samples.labels[:, :30] == 1).all()


def batches(padding, rank):
    order = SampleOrder(len(LENGTHS), seed=1)
    loader = BatchLoader(Packed(), order, constant_batch(4, 30), BatchPlace(1, rank, 2, padding))
    return [loader.batch(step) for step in range(2)]


def test_a_common_width_over_ranks_and_microbatches_keeps_the_counts():
    widths = {}
    for padding in (Padding(), Padding(is_equal=True, multiple=4)):
        fed = [batch for rank in range(2) for batch in batches(padding, rank)]
        widths[padding] = {each.input_ids.shape[1] for batch in fed for each in batch.microbatches}
        counts = [(batch.hash, batch.num_tokens, batch.num_labels) for batch in fed]
        assert counts == [(b.hash, b.num_tokens, b.num_labels) for rank in range(2) for b in batches(Padding(), rank)]
    assert widths == {Padding(): {8, 16, 24, 30}, Padding(is_equal=True, multiple=4): {32}}
