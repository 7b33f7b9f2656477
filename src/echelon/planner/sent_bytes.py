"""Bytes that a rank sends in one step, by axis: the formulas of docs/memory-and-traffic.md and each technique's page.

Tests count the same bytes in real processes (tests/parity/test_traffic.py, test_products.py).
"""

from collections.abc import Mapping

from echelon.planner.axes.axis import Sender
from echelon.planner.axes.table import AXES, divide_shape, rank_loads
from echelon.planner.hardware.accelerators import DeviceKind
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan


def count_step_bytes(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind = "cuda") -> Mapping[str, float]:
    """Bytes by axis (`dp` between copies of the weights, `shard`, and the others by name), of the rank that sends the
    most.

    Scalars, router losses, gradients of norms whose sequence is divided, and what an optimizer sends are left out.
    """
    part = divide_shape(shape, plan)
    found = []
    for rank, load in enumerate(rank_loads(shape, plan)):
        sender = Sender(part, load, rank, plan, kind)
        found.append({name: count for axis in AXES for name, count in axis.sent_bytes(sender).items()})
    return max(found, key=lambda counts: sum(counts.values()))
