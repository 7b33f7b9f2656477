"""Medians of all numbers but one, by which an odd one is found among many."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def find_medians_of_others(numbers: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """For each number the median of all others; a number alone stands for its own median. Sorts once."""
    values = np.asarray(numbers, np.float64)
    count = len(values)
    if count < 2:
        return values
    order = np.argsort(values, kind="stable")
    in_order, index = values[order], np.arange(count)
    low, high = (count - 2) // 2, (count - 1) // 2  # the middle of a list without one of its numbers
    medians = np.empty(count)
    medians[order] = (in_order[low + (low >= index)] + in_order[high + (high >= index)]) / 2
    return medians
