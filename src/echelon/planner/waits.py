"""What ranks wait for each other at collectives, because none of them computes at an even speed."""

import math
from statistics import NormalDist

from echelon.planner.plan import ParallelPlan
from echelon.planner.sent_bytes import count_reductions


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
    steps, passes = plan.num_microbatches, 3 if plan.activation_checkpointing == "full" else 2
    reductions = count_reductions(plan)
    gathers = 2 * steps if plan.reshard_after_forward else 1
    collectives = {  # the ranks of each axis, and how often they meet
        "dp": (plan.dp_replicate, reductions),
        "shard": (plan.dp_shard * plan.cp, num_layers * (gathers + reductions)),
        "tp": (plan.tp, steps * num_layers * passes * (4 if plan.sequence_parallel else 2)),
        "cp": (plan.cp, steps * num_layers * 3),
        "ep": (plan.ep, steps * num_layers * 4),
        "pp": (plan.pp, 2 * steps * len(plan.stages) // plan.pp),
    }
    several = {axis: each for axis, each in collectives.items() if each[0] > 1}
    total = sum(times for _, times in several.values())
    return {
        axis: expect_wait(ranks, jitter, seconds * times / total, times) for axis, (ranks, times) in several.items()
    }
