"""What ranks wait for each other at collectives, because none of them computes at an even speed."""

import math
from statistics import NormalDist

from echelon.planner.axes.table import AXES
from echelon.planner.plan import ParallelPlan


def expect_largest(count: int) -> float:
    """The expected largest of `count` independent numbers of a standard normal distribution.

    The quantile of Blom, "Statistical Estimates and Transformed Beta-Variables" (1958), at (n - 3/8) / (n + 1/4).
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def expect_wait(count: int, jitter: float, seconds: float, times: float) -> float:
    """The expected seconds in which one of `count` ranks waits for the last, at `times` collectives in a step.

    Between two of them each rank computes for a part s of `seconds`; its time varies normally with a standard deviation
    of jitter * sqrt(s), as the sum of many short independent disturbances does.
    """
    return jitter * expect_largest(count) * math.sqrt(seconds * times)


def expect_waits(plan: ParallelPlan, num_layers: int, seconds: float, jitter: float) -> dict[str, float]:
    """The expected seconds in a step of a rank with so many layers, at the collectives of each axis that has several.

    `seconds`: of a step, in which it computes. Empty without jitter.
    """
    if not jitter:
        return {}
    meetings = {name: meeting for axis in AXES for name, meeting in axis.meetings(plan, num_layers).items()}
    several = {name: (ranks, times) for name, (ranks, times) in meetings.items() if ranks > 1}
    total = sum(times for _, times in several.values())
    return {
        name: expect_wait(ranks, jitter, seconds * times / total, times) for name, (ranks, times) in several.items()
    }
