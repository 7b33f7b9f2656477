"""A link with a latency between two machines of `namespaces.py`: a relay that passes each packet on some time later.

Started in the network namespace of the switch, which needs no `netem` in the kernel:

    python tests/delayed_link.py FIRST SECOND SECONDS
"""

import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the relay runs this file alone
    from tests.namespaces import Machine

_READY = "relays"
_EVERY_PROTOCOL = 0x0003
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_MOST_BYTES, _BUFFER_BYTES, _AT_ONCE = 2**17, 2**24, 64


@contextmanager
def delayed(first: "Machine", second: "Machine", seconds: float) -> Iterator[None]:
    """Scope in which each packet between two machines arrives `seconds` later; a round trip takes twice as long.

    The two are disconnected from the others.
    """
    enter = ["ip", "netns", "exec", first.switch]
    for machine in (first, second):
        subprocess.run([*enter, "ip", "link", "set", machine.name, "nomaster"], check=True)
    command = [*enter, sys.executable, __file__, first.name, second.name, str(seconds)]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None and relay.stdout.readline().strip() == _READY
        yield
    finally:
        relay.kill()
        relay.wait()
        for machine in (first, second):
            subprocess.run([*enter, "ip", "link", "set", machine.name, "master", "bridge"], check=True)


def relay_packets(first: str, second: str, seconds: float) -> None:
    """Pass packets between two interfaces, each `seconds` after it came. Does not return."""
    ends = [_open(name) for name in (first, second)]
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    print(_READY, flush=True)
    while True:
        for end, packets in waiting.items():
            while packets and packets[0][0] <= time.monotonic():
                end.send(packets.popleft()[1])
        due = [packets[0][0] for packets in waiting.values() if packets]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        for end in select.select(ends, [], [], patience)[0]:
            for _ in range(_AT_ONCE):
                try:
                    packet = end.recv(_MOST_BYTES)
                except BlockingIOError:
                    break
                waiting[other[end]].append((time.monotonic() + seconds, packet))


def _open(interface: str) -> socket.socket:
    """A socket for all packets that come through an interface, and to send through it.

    Each is preceded by what the kernel has left to the network card, checksums and segments, which is passed on.
    """
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, 33, _BUFFER_BYTES)  # SO_RCVBUFFORCE: root may exceed the limit
    end.bind((interface, _EVERY_PROTOCOL))
    end.setblocking(False)
    return end


if __name__ == "__main__":
    relay_packets(sys.argv[1], sys.argv[2], float(sys.argv[3]))
