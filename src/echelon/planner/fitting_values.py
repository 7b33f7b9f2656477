"""Values that would fit, for messages: the nearest ones, as a list in a sentence."""

from collections.abc import Sequence


def nearest(values: list[int], target: int, each_side: int = 2) -> list[int]:
    """The values closest to a target on both sides, including the target if it is among them, sorted."""
    below, above = [v for v in values if v <= target], [v for v in values if v > target]
    return below[-each_side:] + above[:each_side]


def join_words(words: Sequence[str], last: str = "or") -> str:
    """The words as a list in a sentence: `1, 2 or 4`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
