"""At what speed of the links between replicas a way to agree makes steps shorter than `sync.name: every_step` does."""

import math

from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.links import Link, Links
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan, SyncPlan
from echelon.planner.replica_limits import without_sync
from echelon.planner.time import estimate_time
from echelon.recipe.synchronization import EVERY_STEP, QUORUM

WORTH = 0.9
"""A way to agree pays if a step takes at most this share of the time that it takes with `every_step`."""

# Bits per second of the slowest and the fastest link that are tried, and the steps between them.
_SLOWEST, _FASTEST, _PER_DECADE, _HALVINGS = 1e6, 1e12, 8, 12
_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"))


def describe_payoff(shape: ModelShape, plan: ParallelPlan, cluster: Cluster) -> str | None:
    """The line about when `sync` pays; None where the plan has one copy of the model, or nothing but `every_step`.

    Raises PlanError if the speed of the devices is unknown.
    """
    num_copies = plan.num_whole_copies
    plain = plan.sync.name == QUORUM or plan.sync == SyncPlan()
    if num_copies == 1 or plain:
        return None
    synced, other = (estimate_time(shape, candidate, cluster).total for candidate in (plan, without_sync(plan)))
    speed = find_payoff(shape, plan, cluster)
    if speed is None:
        limit = "at no speed of the links between replicas"
    elif speed >= _FASTEST:
        limit = "at any speed of the links between replicas"
    else:
        limit = f"where the links between replicas have less than {_render(speed)} per process"
    sync = plan.sync
    name = f"sync.compress {sync.method}" if sync.name == EVERY_STEP else f"sync {sync.name}"
    return (
        f"{name}: {synced:.3g} s per step here, {other:.3g} s with every_step and no compression; it shortens steps by "
        f"at least {1 - WORTH:.0%} {limit}"
    )


def find_payoff(shape: ModelShape, plan: ParallelPlan, cluster: Cluster) -> float | None:
    """The fastest link between replicas, in bit/s for each process, at which `sync` pays; None: at no speed.

    Between 1 Mbit/s and 1 Tbit/s; computation, and links inside a replica, are those of the cluster. Raises as
    `describe_payoff` does.
    """
    other, latency = without_sync(plan), cluster.known_links.between.latency

    def pays(speed: float) -> bool:
        link = Link("", speed / 8, latency, "")
        ours, theirs = (
            estimate_time(shape, candidate, cluster, between=Links(link, link)).total for candidate in (plan, other)
        )
        return ours <= WORTH * theirs

    count = round(_PER_DECADE * 6)
    speeds: list[float] = [_SLOWEST * (_FASTEST / _SLOWEST) ** (number / count) for number in range(count + 1)]
    paying = [speed for speed in speeds if pays(speed)]
    if not paying or paying[-1] == speeds[-1]:
        return _FASTEST if paying else None
    low: float = paying[-1]
    high: float = speeds[speeds.index(low) + 1]
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _render(speed: float) -> str:
    size, unit = next(row for row in _UNITS if speed >= row[0] or row is _UNITS[-1])
    return f"{speed / size:.3g} {unit}"
