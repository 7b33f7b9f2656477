"""The order of a stream: samples are shuffled only within windows, because the later ones are not there yet."""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from echelon.learn.data.order import DataOrder, Permutation, branch_seed


class WindowOrder(DataOrder):
    """The endless order of samples that are shuffled only within windows of `window` samples, in reading order.

    Position g is r = g mod num_samples in epoch e = g // num_samples, and in window b = r // window, of
    m = min(window, num_samples - b * window) samples. It takes sample
    `b * window + Permutation(m, (seed_b, e)).apply(r mod window)`, where seed_0 is the seed and seed_b, for other
    windows, its branch b. So one window over all samples is `SampleOrder`.
    """

    def __init__(self, num_samples: int, window: int, seed: int) -> None:
        assert num_samples > 0 and window > 0, f"windows of {window} of {num_samples} samples"
        self.num_samples = num_samples
        self.window = window
        self.seed = seed

    @override
    def sample_ids(self, start: int, count: int) -> npt.NDArray[np.int64]:
        parts = [np.empty(0, dtype=np.int64)]
        stop = start + count
        while start < stop:
            epoch, position = divmod(start, self.num_samples)
            block, index = divmod(position, self.window)
            first = block * self.window
            size = min(self.window, self.num_samples - first)
            taken = min(stop - start, size - index)
            shuffled = Permutation(size, (branch_seed(self.seed, block) if block else self.seed, epoch))
            parts.append(first + shuffled.apply(np.arange(index, index + taken)))
            start += taken
        return np.concatenate(parts)


@runtime_checkable
class Growing(Protocol):
    """Samples in reading order, whose number is known only when all have been read."""

    num_samples: int
    """More than any number of samples."""

    def reach(self, count: int) -> int:
        """Wait until `count` samples are there, or all; returns how many are there."""

    def expect(self, position: int, window: int) -> None:
        """Tell that the window of a position of the run is read next, and then the window after it."""


class StreamOrder(DataOrder):
    """The `WindowOrder` of samples that arrive while a run reads them: a window is shuffled once it is there.

    A position depends on the number of all samples only from the end of the last whole window on. It is known then.
    """

    is_known = False

    def __init__(self, samples: Growing, window: int, seed: int) -> None:
        self.num_samples = samples.num_samples
        self.window = window
        self.seed = seed
        self._samples = samples

    @override
    def sample_ids(self, start: int, count: int) -> npt.NDArray[np.int64]:
        self._samples.expect(start, self.window)
        there = self._samples.reach(-(-(start + count) // self.window) * self.window)
        return WindowOrder(there, self.window, self.seed).sample_ids(start, count)
