"""Values that would fit, for messages."""


def nearest(values: list[int], target: int, each_side: int = 2) -> list[int]:
    """The values closest to a target on both sides, including the target if it is among them, sorted."""
    below, above = [v for v in values if v <= target], [v for v in values if v > target]
    return below[-each_side:] + above[:each_side]
