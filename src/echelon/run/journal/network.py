"""What the ranks of a run send, beside what the network interfaces of this machine carry. Only on rank 0."""

import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.ground.sizes import render_bytes, render_rate
from echelon.learn.distributed.traffic import TrafficMeter

_LANE_BYTES = 4  # InfiniBand counts in units of four bytes: Documentation/ABI/stable/sysfs-class-infiniband


@dataclass(frozen=True)
class InterfaceBytes:
    """Bytes that went through an interface."""

    sent: int
    received: int


def read_interfaces(root: Path = Path("/")) -> dict[str, InterfaceBytes]:
    """Return the counters of each interface, Ethernet and InfiniBand, by name; empty where there are none.

    Linux only. `root`: the folder that holds /proc and /sys.
    """
    counters = {}
    with suppress(OSError, ValueError, IndexError):
        # Two lines of headings, then "name: received ... sent ...", with eight numbers each: proc_pid_net(5).
        for line in (root / "proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            received, sent = (int(numbers.split()[column]) for column in (0, 8))
            counters[name.strip()] = InterfaceBytes(sent, received)
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with suppress(OSError, ValueError):
            sent, received = (
                _LANE_BYTES * int((port / "counters" / f"port_{way}_data").read_text(encoding="utf-8"))
                for way in ("xmit", "rcv")
            )
            counters[f"{port.parent.parent.name}:{port.name}"] = InterfaceBytes(sent, received)
    return counters


def subtract_interfaces(
    now: Mapping[str, InterfaceBytes], before: Mapping[str, InterfaceBytes]
) -> dict[str, InterfaceBytes]:
    """Return what went through each interface between two readings; interfaces that carried nothing are left out."""
    zero = InterfaceBytes(0, 0)
    pairs = {name: (counts, before.get(name, zero)) for name, counts in now.items()}
    moved = {name: InterfaceBytes(a.sent - b.sent, a.received - b.received) for name, (a, b) in pairs.items()}
    return {name: counts for name, counts in moved.items() if counts.sent > 0 or counts.received > 0}


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
