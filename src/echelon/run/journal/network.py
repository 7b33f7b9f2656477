"""What the ranks of a run send, beside what the network interfaces of this machine carry. Only on rank 0."""

import platform
import time
from dataclasses import asdict
from typing import Any

from echelon.ground.sizes import render_bytes, render_rate
from echelon.learn.distributed.traffic import TrafficMeter
from echelon.planner.hardware.interfaces import read_interfaces, subtract_interfaces


class NetworkWatch:
    """Compares the bytes that ranks send in collectives with those that interfaces carry, from now on."""

    def __init__(self, meter: TrafficMeter) -> None:
        """`meter`: of this rank."""
        self._meter = meter
        self._routes = meter.by_route()
        self._interfaces = read_interfaces()
        self._began = time.monotonic()
        self._steps = 0
        self._sent = 0.0

    def saw_step(self, sent_bytes: float) -> None:
        """Count a step, in which a rank sent so much on average."""
        self._steps += 1
        self._sent += sent_bytes

    def summarize(self) -> dict[str, Any] | None:
        """Return the fields of the event `network`; None if nothing was sent.

        Steps count with their mean over ranks; `collectives` are those of rank 0, with evaluations and saves;
        `interfaces` are those of its machine, with the bytes of all programs.
        """
        if self._sent == 0:
            return None
        routes = self._meter.by_route()
        moved = subtract_interfaces(read_interfaces(), self._interfaces)
        return {
            "host": platform.node(),
            "seconds": time.monotonic() - self._began,
            "steps": self._steps,
            "sent_bytes": self._sent,
            "collectives": {
                f"{route.kind} of {route.group}": sent - self._routes.get(route, 0.0) for route, sent in routes.items()
            },
            "interfaces": {name: asdict(counts) for name, counts in moved.items()},
        }


def describe_network(found: dict[str, Any]) -> str:
    """Return a line about the fields of the event `network`."""
    per_step, rate = found["sent_bytes"] / found["steps"], found["sent_bytes"] / found["seconds"]
    text = f"network: each rank sent {render_bytes(per_step)} in collectives per step, {render_rate(rate)} on average"
    carried = [
        f"{name} {render_rate(counts['sent'] / found['seconds'])}" for name, counts in found["interfaces"].items()
    ]
    return text + (f"; interfaces of {found['host']}, all programs: {', '.join(carried)}" if carried else "")
