"""The order of samples: a pure function of (seed, position), the same for any number of ranks.

A list of shuffled indices would need memory in proportion to the corpus and time at every resume. Instead the index is
encrypted: a Feistel network is a bijection of [0, 2^(2h)) for any round function, and applying it repeatedly until the
value is below `size` gives a bijection of [0, size) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
Any position is computed in O(1).

A test fixes the values: another order for the same seed would change every resumed run.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

Words = npt.NDArray[np.uint64]

_NUM_ROUNDS = 10
_MIN_HALF_BITS = 3
_AHEAD = 1024
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(words: Words) -> Words:
    """Hash 64-bit words bijectively: the finalizer of splitmix64 (Steele, Lea, Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def branch_seed(seed: int, branch: int) -> int:
    """Derive a 64-bit seed for a branch of the run's seed, for example for a source of a mixture."""
    state = mix(np.full(1, (seed + _GOLDEN) & _MASK, dtype=np.uint64))
    return int(mix(state + np.uint64((branch + 1) * _GOLDEN & _MASK))[0])


def _round_keys(seed: int, epochs: Words) -> Words:
    """Return one key per round and epoch, `[rounds, epochs]`."""
    state = mix(mix(np.full(1, (seed + _GOLDEN) & _MASK, dtype=np.uint64)) ^ epochs)
    return np.stack([mix(state + np.uint64(index * _GOLDEN & _MASK)) for index in range(1, _NUM_ROUNDS + 1)])


def _encrypt(values: Words, half_bits: int, round_keys: Words) -> Words:
    half = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left, right = values >> half, values & mask
    for key in round_keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << half) | right


def _permute(indices: Words, size: int, round_keys: Words) -> Words:
    """Encrypt each index with its own column of keys, `[rounds, indices]`, until it is below `size`."""
    half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    values = _encrypt(indices, half_bits, round_keys)
    (outside,) = np.nonzero(values >= size)
    while outside.size:
        values[outside] = _encrypt(values[outside], half_bits, round_keys[:, outside])
        outside = outside[values[outside] >= size]
    return values


class Permutation:
    """A bijection of [0, size), determined by its key (seed, epoch). `size` is at most 2^62."""

    def __init__(self, size: int, key: tuple[int, int]) -> None:
        assert 0 < size <= 2**62, f"a permutation of {size} values"
        self.size = size
        seed, epoch = key
        self._round_keys = _round_keys(seed, np.full(1, epoch, dtype=np.uint64))

    def apply(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Permute the indices `[n]`, each in [0, size)."""
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < self.size), "an index is out of range"
        keys = np.broadcast_to(self._round_keys, (_NUM_ROUNDS, indices.size))
        return _permute(indices.astype(np.uint64), self.size, keys).astype(np.int64)


class DataOrder(Protocol):
    """Maps positions of the run, counted in sequences from its start, to samples."""

    num_samples: int
    is_known: bool = True
    """Whether any position can be looked up at once. If not, it waits for data."""

    def sample_ids(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The samples at positions [start, start + count), `[count]`."""


class SampleOrder(DataOrder):
    """The endless order of samples: in each epoch, another permutation of all samples.

    Position g of the whole run (sequences before the step + index in its batch) takes sample
    `Permutation(num_samples, (seed, g // num_samples)).apply(g % num_samples)`.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        assert 0 <= num_samples <= 2**62, f"an order of {num_samples} samples"
        self.num_samples = num_samples
        self.seed = seed

    @override
    def sample_ids(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The samples at positions [start, start + count), `[count]`."""
        return self.samples_at(np.arange(start, start + count, dtype=np.int64))

    def samples_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples at any positions `[n]`."""
        epochs, indices = np.divmod(positions.astype(np.uint64), np.uint64(self.num_samples))
        return _permute(indices, self.num_samples, _round_keys(self.seed, epochs)).astype(np.int64)


class OrderAhead(DataOrder):
    """The same order, looked up many positions at a time: 1,024 of them take about twice as long as one.

    Only where the next lookups will use them: not before the second lookup, nor where each is further on than half of
    these positions. For one thread.
    """

    def __init__(self, order: DataOrder) -> None:
        self.num_samples = order.num_samples
        self._order = order
        self._start, self._known = 0, np.empty(0, dtype=np.int64)
        self._previous = -_AHEAD
        self._most = _AHEAD if order.is_known else 0

    @override
    def sample_ids(self, start: int, count: int) -> npt.NDArray[np.int64]:
        if not self._start <= start <= start + count <= self._start + len(self._known):
            ahead = self._most if 0 <= start - self._previous <= _AHEAD // 2 else 0
            self._start, self._known = start, self._order.sample_ids(start, max(count, ahead))
        self._previous = start
        first = start - self._start
        return self._known[first : first + count]
