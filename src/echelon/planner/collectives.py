"""Seconds of collective operations between the ranks of an axis: latency plus bytes over bandwidth, by level.

The form alpha + n * beta of Hockney (1994). A collective over several machines runs inside the machines and between
them at once, on all network cards, so it takes as long as the slower of the two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.links import Links
from echelon.planner.plan import ParallelPlan


@dataclass(frozen=True)
class CommunicationGroup:
    """The ranks of one or more axes that communicate: `size` of them, `local` on each machine that has any."""

    size: int
    local: int
    links: Links

    @property
    def num_machines(self) -> int:
        """Machines that the ranks are on."""
        return -(-self.size // self.local)

    @property
    def latency(self) -> float:
        """Seconds of a collective without a payload: rounds of a tree inside a machine, and of one between them."""
        inside = math.ceil(math.log2(self.local)) if self.local > 1 else 0
        between = math.ceil(math.log2(self.num_machines)) if self.num_machines > 1 else 0
        return inside * self.links.inside.latency / 3 + between * self.links.between.latency

    def all_gather(self, num_bytes: float, measured: float | None = None) -> float:
        """Seconds until every rank has the `num_bytes` that they have parts of; a reduce-scatter takes as long.

        `measured`: bytes/s inside a machine, with the copies of a sharded layer.
        """
        if self.size == 1 or not num_bytes:
            return 0.0
        inside = num_bytes * (self.local - 1) / self.local / (measured or self.links.inside.bandwidth)
        nodes = self.num_machines
        between = num_bytes * (nodes - 1) / nodes / (self.local * self.links.between.bandwidth)
        return self.latency + max(inside, between)

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds until every rank has the sum of `num_bytes` of each: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(num_bytes)

    def all_to_all(self, num_bytes: float) -> float:
        """Seconds until every rank has sent equal parts of its `num_bytes` to all."""
        if self.size == 1 or not num_bytes:
            return 0.0
        remote = (self.size - self.local) / self.size
        inside = num_bytes * (self.local - 1) / self.size / self.links.inside.bandwidth
        return self.latency + max(inside, num_bytes * remote / self.links.between.bandwidth)

    def send(self, num_bytes: float) -> float:
        """Seconds until the next rank has `num_bytes`; between machines if any rank's neighbour is on another one."""
        if self.size == 1:
            return 0.0
        if self.num_machines > 1:
            return self.links.between.latency + num_bytes / self.links.between.bandwidth
        return self.links.inside.latency / 3 + num_bytes / self.links.inside.bandwidth  # one round of a collective


def find_group(plan: ParallelPlan, cluster: Cluster, axes: Sequence[str]) -> CommunicationGroup:
    """The ranks that differ only along these axes. Inner axes are placed on the devices of a machine first."""
    size, stride, inner = 1, 1, True
    for axis in reversed(plan.order):
        degree = getattr(plan, axis)
        if axis in axes:
            size, inner = size * degree, False
        elif inner:
            stride *= degree
    local = min(size, max(1, cluster.devices_per_node // stride))
    return CommunicationGroup(size, math.gcd(local, size) if size % local else local, cluster.known_links)
