"""A mixture: sources interleaved by weight, each with its own epochs.

The shares are exact: a table of P slots assigns each source a whole number of slots, in an order drawn from the seed,
and the run goes through this table repeatedly. Prefix counts of the table give a sample's index within its source at
any position of the run, so any position is computed in O(1), and no rank keeps state.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.data.order import DataOrder, Permutation, SampleOrder, branch_seed
from echelon.learn.data.shards import Dataset, Samples
from echelon.recipe.document import Recipe

MIN_SLOTS = 1000
MAX_SLOTS = 1_000_000

Ids = npt.NDArray[np.int64]


def divide_slots(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of table slots for each source.

    Weights are used as exact decimals. The table has the smallest number of slots, at least 1000, in which every share
    is a whole number; above one million, it has one million slots, allocated by largest remainder. Raises ConfigError
    for a source that would get no slot.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    unit = math.lcm(*(share.denominator for share in shares))
    num_slots = MAX_SLOTS if unit > MAX_SLOTS else unit * -(-MIN_SLOTS // unit)
    slots = [math.floor(share * num_slots) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: (slots[source] - shares[source] * num_slots, source))
    for source in by_remainder[: num_slots - sum(slots)]:
        slots[source] += 1
    for source, count in enumerate(slots):
        if count == 0:
            raise ConfigError(
                f"data.train.{source}.weight={weights[source]:g} gives less than one sequence in a million; use a "
                "larger weight, or leave the source out."
            )
    return tuple(slots)


class MixtureOrder(DataOrder):
    """The endless order of a mixture's samples, which are numbered through: source after source.

    Position g of the run is slot g mod P of the table's round g div P. The n-th sequence that a source gives is the
    n-th of its own `SampleOrder`: epoch after epoch, each a permutation of its own of the source's samples.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`sizes`: how many samples each source has."""
        assert len(sizes) == len(weights) and min(sizes) > 0, f"a mixture of {sizes} samples"
        self.sizes = tuple(sizes)
        self.slots = divide_slots(weights)
        self.num_samples = sum(sizes)
        self._orders = [SampleOrder(size, branch_seed(seed, 1 + source)) for source, size in enumerate(sizes)]
        self._offsets = np.cumsum([0, *sizes])
        num_slots = sum(self.slots)
        shuffled = Permutation(num_slots, (branch_seed(seed, 0), 0)).apply(np.arange(num_slots))
        self._sources = np.repeat(np.arange(len(sizes)), self.slots)[shuffled]
        self._earlier = np.empty(num_slots, dtype=np.int64)
        for source, count in enumerate(self.slots):
            self._earlier[self._sources == source] = np.arange(count)

    @override
    def sample_ids(self, start: int, count: int) -> Ids:
        """Return the samples at positions [start, start + count), `[count]`."""
        rounds, places = np.divmod(np.arange(start, start + count, dtype=np.int64), len(self._sources))
        sources = self._sources[places]
        uses = rounds * np.array(self.slots)[sources] + self._earlier[places]
        ids = np.empty(count, dtype=np.int64)
        for source in np.unique(sources):
            chosen = sources == source
            ids[chosen] = self._offsets[source] + self._orders[source].samples_at(uses[chosen])
        return ids

    def uses_before(self, position: int) -> list[int]:
        """Return the number of sequences from each source at positions [0, position)."""
        rounds, rest = divmod(position, len(self._sources))
        counts = np.bincount(self._sources[:rest], minlength=len(self.slots))
        return [rounds * slots + int(count) for slots, count in zip(self.slots, counts, strict=True)]


class MixtureDataset:
    """The samples of several sources with consecutive ids: the id within the source plus an offset."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.parts = tuple(parts)
        self.sequence_len = parts[0].sequence_len
        self._stops = np.cumsum([part.num_samples for part in parts])

    @property
    def num_tokens(self) -> int:
        """The tokens of all sources."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_samples(self) -> int:
        """The sequences of all sources. No sequence has text of two sources."""
        return int(self._stops[-1])

    def read_samples(self, sample_ids: Ids) -> Samples:
        """Read the samples `[n]`, from any source."""
        sources = np.searchsorted(self._stops, sample_ids, side="right")
        chosen = [np.flatnonzero(sources == source) for source in range(len(self.parts))]
        by_part = [
            part.read_samples(sample_ids[rows] - (stop - part.num_samples))
            for part, stop, rows in zip(self.parts, self._stops, chosen, strict=True)
        ]
        back = np.argsort(np.concatenate(chosen))
        inputs, labels = (
            np.concatenate([getattr(samples, name) for samples in by_part])[back] for name in ("inputs", "labels")
        )
        documents = [samples.documents for samples in by_part if samples.documents is not None]
        extra = {name: np.concatenate([samples.extra[name] for samples in by_part])[back] for name in by_part[0].extra}
        return Samples(inputs, labels, np.concatenate(documents)[back] if documents else None, by_part[0].apart, extra)

    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        """Yield the tokens of all sources, one source after the other, in chunks."""
        for part in self.parts:
            yield from part.iter_tokens(chunk_tokens)


def build_order(recipe: Recipe, dataset: Dataset) -> DataOrder:
    """Build the order in which a run of the recipe reads its training data."""
    if isinstance(dataset, MixtureDataset):
        return MixtureOrder([part.num_samples for part in dataset.parts], recipe.data.weights, recipe.run.seed)
    if (stream := recipe.data.stream) is not None:
        from echelon.learn.data.stream.window_order import Growing, StreamOrder, WindowOrder

        if isinstance(dataset, Growing):
            return StreamOrder(dataset, stream.window, recipe.run.seed)
        return WindowOrder(dataset.num_samples, stream.window, recipe.run.seed)
    return SampleOrder(dataset.num_samples, recipe.run.seed)
