"""The kernel's counters of the network interfaces of this machine: bytes of all programs, sent and received."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    found = {}
    with suppress(OSError, ValueError, IndexError):
        # Two lines of headings, then "name: received ... sent ...", with eight numbers each: proc_pid_net(5).
        for line in (root / "proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            received, sent = (int(numbers.split()[place]) for place in (0, 8))
            found[name.strip()] = InterfaceBytes(sent, received)
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with suppress(OSError, ValueError):
            sent, received = (
                _LANE_BYTES * int((port / "counters" / f"port_{way}_data").read_text(encoding="utf-8"))
                for way in ("xmit", "rcv")
            )
            found[f"{port.parent.parent.name}:{port.name}"] = InterfaceBytes(sent, received)
    return found


def subtract_interfaces(
    now: Mapping[str, InterfaceBytes], before: Mapping[str, InterfaceBytes]
) -> dict[str, InterfaceBytes]:
    """Return what went through each interface between two readings; interfaces that carried nothing are left out."""
    zero = InterfaceBytes(0, 0)
    pairs = {name: (counts, before.get(name, zero)) for name, counts in now.items()}
    moved = {name: InterfaceBytes(a.sent - b.sent, a.received - b.received) for name, (a, b) in pairs.items()}
    return {name: counts for name, counts in moved.items() if counts.sent > 0 or counts.received > 0}
