"""The keyed bijection is a bijection, has fixed values, and shuffles well."""

import numpy as np
import pytest

from echelon.learn.data.order import OrderAhead, Permutation, SampleOrder
from echelon.learn.data.stream.window_order import StreamOrder, WindowOrder

WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix_one(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def permute_one(index: int, size: int, seed: int, epoch: int) -> int:
    """The same bijection with Python integers, one value at a time."""
    state = mix_one(mix_one((seed + GOLDEN) & WORD) ^ epoch)
    half = max(3, ((size - 1).bit_length() + 1) // 2)
    mask = 2**half - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(1, 11):
            key = mix_one((state + number * GOLDEN) & WORD)
            left, right = right, left ^ (mix_one((right + key) & WORD) & mask)
        index = (left << half) | right
        if index < size:
            return index


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_is_a_bijection_for_every_small_size_and_some_large_ones():
    for size in [*range(1, 200), 255, 256, 257, 1000, 4095, 4097, 100_003]:
        out = Permutation(size, (3, 1)).apply(np.arange(size))
        assert np.array_equal(np.sort(out), np.arange(size)), size


@pytest.mark.parametrize("size", [1, 2, 7, 64, 65, 1000, 2**31 + 11, 2**40 + 3, 2**62])
def test_agrees_with_a_scalar_implementation(size):
    indices = np.random.default_rng(0).integers(0, size, 20)
    for seed, epoch in [(0, 0), (1, 0), (0, 1), (2**63, 5), (-1, 2**40)]:
        expected = [permute_one(int(index), size, seed, epoch) for index in indices]
        assert Permutation(size, (seed, epoch)).apply(indices).tolist() == expected


def test_values_are_frozen():
    """A change of these values would change the data order of every existing run: never edit them."""
    assert Permutation(10, (0, 0)).apply(np.arange(10)).tolist() == [5, 7, 0, 1, 9, 3, 6, 8, 2, 4]
    assert Permutation(10, (0, 1)).apply(np.arange(10)).tolist() == [7, 1, 0, 4, 6, 9, 5, 3, 8, 2]
    large = [444992, 385536, 743751, 912021, 763556, 348962]
    assert Permutation(1_000_003, (1234, 7)).apply(np.arange(6)).tolist() == large
    huge = [833442084230, 497617282954, 172576698227, 33244012878]
    assert Permutation(2**40 + 3, (42, 0)).apply(np.arange(4)).tolist() == huge
    assert SampleOrder(5, seed=99).sample_ids(3, 9).tolist() == [2, 1, 3, 2, 4, 0, 1, 4, 0]


def test_every_sample_is_equally_likely_at_every_position():
    """10 samples, 20,000 epochs: 100 cells of 2,000, 81 degrees of freedom, so 145 is five deviations above."""
    ids = SampleOrder(10, seed=5).sample_ids(0, 200_000).reshape(20_000, 10)
    counts = np.zeros((10, 10), dtype=np.int64)
    for position in range(10):
        counts[position] = np.bincount(ids[:, position], minlength=10)
    assert chi_square(counts) < 145


def test_all_orders_of_four_samples_are_equally_likely():
    """24 orders, 23 degrees of freedom: 57 is five standard deviations above."""
    ids = SampleOrder(4, seed=1).sample_ids(0, 96_000).reshape(24_000, 4)
    _, counts = np.unique(ids, axis=0, return_counts=True)
    assert counts.size == 24
    assert chi_square(counts) < 57


def test_neighbours_are_uncorrelated():
    size = 100_003
    out = Permutation(size, (0, 0)).apply(np.arange(size))
    bound = 4.5 / np.sqrt(size)
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < bound
    assert abs(np.corrcoef(np.arange(size), out)[0, 1]) < bound
    steps = np.diff(out) % size
    assert chi_square(np.bincount(steps * 64 // size, minlength=64)) < 63 + 5 * np.sqrt(2 * 63)


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, 1), (2**32, 0)])
def test_other_seeds_and_epochs_give_independent_orders(other):
    size = 100_003
    first = Permutation(size, (0, 0)).apply(np.arange(size))
    second = Permutation(size, other).apply(np.arange(size))
    assert np.count_nonzero(first == second) < 10  # one is expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / np.sqrt(size)


def test_huge_sizes_need_no_memory():
    size = 2**45 + 17
    indices = np.array([0, 1, 2**44, size - 1])
    out = Permutation(size, (0, 0)).apply(indices)
    assert len(set(out.tolist())) == 4
    assert out.max() < size
    far = SampleOrder(size, seed=0).sample_ids(3 * size - 1, 2)
    assert far[0] == Permutation(size, (0, 2)).apply(np.array([size - 1]))[0]
    assert far[1] == Permutation(size, (0, 3)).apply(np.array([0]))[0]


def test_order_continues_into_the_next_epoch():
    order = SampleOrder(7, seed=3)
    ids = order.sample_ids(0, 28)
    for epoch in range(4):
        assert sorted(ids[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert order.sample_ids(5, 9).tolist() == ids[5:14].tolist()
    assert order.sample_ids(5, 0).size == 0


def test_an_order_ahead_is_the_same_order_at_any_jump():
    order = SampleOrder(1000, seed=3)
    ahead = OrderAhead(order)
    assert ahead.num_samples == 1000
    for start, count in [(0, 12), (12, 12), (1020, 12), (500, 3000), (3499, 1), (2, 7), (5000, 0), (10**12, 4)]:
        assert ahead.sample_ids(start, count).tolist() == order.sample_ids(start, count).tolist()


@pytest.mark.parametrize(
    ("stride", "count", "lookups", "first"),
    [
        (8, 8, 2, [(0, 8), (8, 1024)]),
        (512, 64, 51, [(0, 64), (512, 1024), (1536, 1024), (2560, 1024)]),
        (2048, 64, 100, [(0, 64), (2048, 64), (4096, 64), (6144, 64)]),
    ],
)
def test_an_order_ahead_looks_up_many_positions_where_the_next_steps_use_them(stride, count, lookups, first):
    """A rank takes `count` positions out of every `stride`, the global batch."""
    asked = []

    class Order(SampleOrder):
        def sample_ids(self, start, count):
            asked.append((start, count))
            return super().sample_ids(start, count)

    ahead = OrderAhead(Order(1000, seed=3))
    for step in range(100):
        ahead.sample_ids(stride * step, count)
    assert len(asked) == lookups and asked[: len(first)] == first


def windowed_one(position: int, size: int, window: int, seed: int) -> int:
    """The order of a stream with Python integers, one position at a time."""
    epoch, place = divmod(position, size)
    block, index = divmod(place, window)
    branch = mix_one((mix_one((seed + GOLDEN) & WORD) + (block + 1) * GOLDEN) & WORD)
    length = min(window, size - block * window)
    return block * window + permute_one(index, length, branch if block else seed, epoch)


@pytest.mark.parametrize(("size", "window"), [(1, 1), (10, 3), (1000, 128), (1000, 999), (1000, 1000), (7, 100)])
def test_samples_are_shuffled_within_windows(size, window):
    order = WindowOrder(size, window, seed=5)
    ids = order.sample_ids(0, 3 * size)
    assert ids.tolist() == [windowed_one(position, size, window, 5) for position in range(3 * size)]
    for epoch in ids.reshape(3, size):
        for first in range(0, size, window):
            assert sorted(epoch[first : first + window]) == list(range(first, min(first + window, size)))
    assert all(np.array_equal(order.sample_ids(first, 2), ids[first : first + 2]) for first in range(3 * size - 1))
    if window >= size:
        assert np.array_equal(ids, SampleOrder(size, seed=5).sample_ids(0, 3 * size))


class Arriving:
    """Samples of which no more are there than an order has waited for."""

    num_samples = 2**62

    def __init__(self, size):
        self.size, self.there = size, 0

    def reach(self, count):
        self.there = max(self.there, min(count, self.size))
        return self.there

    def expect(self, position, window):
        pass


def test_the_order_of_a_stream_waits_only_for_the_window_of_a_position():
    whole, samples = WindowOrder(100, 16, seed=2), Arriving(100)
    order = StreamOrder(samples, 16, seed=2)
    for start in range(0, 250, 4):
        assert np.array_equal(order.sample_ids(start, 4), whole.sample_ids(start, 4))
        assert samples.there == min(100, -(-(start + 4) // 16) * 16)
    late = StreamOrder(Arriving(100), 16, seed=2)  # a run that is resumed in its third epoch
    assert np.array_equal(late.sample_ids(212, 8), whole.sample_ids(212, 8))
