"""The fastest of several plans by the predicted time of a step, where the speed of the devices was measured."""

from collections.abc import Sequence

from echelon.hardware.accelerators import Cluster
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.time import estimate_time

_CLOSE = 0.05  # a plan that is slower by less is as fast: predictions are not more exact


def ranks_by_time(cluster: Cluster) -> bool:
    """Whether predictions for these devices are exact enough to choose by them: they were calibrated."""
    return cluster.calibration is not None


def choose_fastest(
    plans: Sequence[ParallelPlan], shape: ModelShape, sequence_len: int, cluster: Cluster
) -> tuple[ParallelPlan, str]:
    """The first of the plans that are about as fast as the fastest one, and why, for the user.

    Args:
        plans: at least one, the simplest first.
    """
    seconds = [estimate_time(shape, plan, sequence_len, cluster).total for plan in plans]
    chosen = next(place for place, each in enumerate(seconds) if each <= (1 + _CLOSE) * min(seconds))
    table = ", ".join(f"{plan.strategy} {each:.3g} s" for plan, each in zip(plans, seconds, strict=True))
    ties = [plan.strategy for plan, each in zip(plans, seconds, strict=True) if each < seconds[chosen]]
    words = f"as fast as {ties[0]} and simpler" if ties else "the fastest"
    return plans[
        chosen
    ], f"{words} of those that fit, by the predicted time of a step on this calibrated device: {table}"
