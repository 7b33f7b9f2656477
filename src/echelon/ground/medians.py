"""Medians of all numbers but one, by which an odd one is found among many."""

from collections.abc import Sequence


def find_medians_of_others(numbers: Sequence[float]) -> list[float]:
    """For each number the median of all others; a number alone stands for its own median. Sorts once."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    medians = list(numbers)
    low, high = (len(order) - 2) // 2, (len(order) - 1) // 2  # the middle of a list without one of its numbers
    for index, place in enumerate(order if len(order) > 1 else ()):
        before, after = order[low + (low >= index)], order[high + (high >= index)]
        medians[place] = (numbers[before] + numbers[after]) / 2
    return medians
