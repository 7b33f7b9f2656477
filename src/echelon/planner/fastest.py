"""The fastest of several plans by the predicted time of a step, where the speed of the devices is known."""

from collections.abc import Sequence

from echelon.planner.fitting_values import join_words
from echelon.planner.hardware.accelerators import ACCELERATORS, Cluster
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.search_space import weighed_axes
from echelon.planner.time import estimate_time

_CLOSE = 0.05  # a plan that is slower by less is as fast: predictions are not more exact
# Plans that divide the model, its experts or sequences have to be faster by more than this: they depend more on links,
# and on what else is divided.
_CLEARLY = 0.10


def ranks_by_time(cluster: Cluster) -> bool:
    """Whether predictions for these devices are exact enough to choose by them: calibrated ones, and known GPUs."""
    return cluster.calibration is not None or (cluster.kind == "cuda" and cluster.accelerator.name in ACCELERATORS)


def choose_fastest(
    simple: Sequence[ParallelPlan],
    divided: Sequence[ParallelPlan],
    shape: ModelShape,
    cluster: Cluster,
) -> tuple[ParallelPlan, str]:
    """The plan to take, and why, for the user.

    Of the simple plans it is the first that is about as fast as the fastest of them, likewise of the divided ones. A
    divided plan is taken if it is clearly faster, or if there is no simple one.

    Args:
        simple: plans that divide the data, the gradients and the states alone, the simplest first.
        divided: plans that divide the model, its experts or sequences as well, the simplest first. At least one of
            both kinds together.
    """
    seconds = {plan: estimate_time(shape, plan, cluster).total for plan in (*simple, *divided)}
    table = ", ".join(f"{plan.strategy} {seconds[plan]:.3g} s" for plan in simple)
    by = f"by the predicted time of a step on {_describe_devices(cluster)}"
    others = _choose(divided, seconds) if divided else None
    best = f"the best of {len(divided)} with {join_words([axis.name for axis in weighed_axes(shape)])}"
    if not simple:
        assert others is not None
        return others, f"{_name(others)}, {seconds[others]:.3g} s, {best}, {by}"
    chosen = _choose(simple, seconds)
    beside = ""
    if others is not None:
        beside = f"; {best} is {_name(others)}, {seconds[others]:.3g} s"
        if (1 + _CLEARLY) * seconds[others] < seconds[chosen]:
            return others, f"{_name(others)}, {seconds[others]:.3g} s, clearly faster than {table}, {by}"
    ties = [plan.strategy for plan in simple if seconds[plan] < seconds[chosen]]
    words = f"as fast as {ties[0]} and simpler" if ties else "the fastest"
    return chosen, f"{words} of those that fit, {by}: {table}{beside}"


def _describe_devices(cluster: Cluster) -> str:
    """The devices, and the links that are assumed between them."""
    if cluster.calibration is not None:
        return "this calibrated device"
    links = cluster.known_links
    between = f" and {links.between.name}" if cluster.num_nodes > 1 else ""
    return f"{cluster.accelerator.name} with {links.inside.name}{between}"


def _choose(plans: Sequence[ParallelPlan], seconds: dict[ParallelPlan, float]) -> ParallelPlan:
    """The first that is about as fast as the fastest of them."""
    fastest = min(seconds[plan] for plan in plans)
    return next(plan for plan in plans if seconds[plan] <= (1 + _CLOSE) * fastest)


def _name(plan: ParallelPlan) -> str:
    """The degrees above 1, and the schedule."""
    return plan.name_degrees() + (f" ({plan.schedule})" if plan.schedule is not None else "")
