"""Sockets of torch's stores: listen on one address only, and recognize a store."""

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, Queue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

Answer = TypeVar("Answer")

_BACKLOG = 4096  # every rank of a large job connects at the same moment
_STORE_SECONDS = 60.0
# The first words of TCPStore's protocol: a request's number, then what it sends.
_VALIDATE, _PING = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=B", 13)


def listen_at(host: str, port: int, admits_loopback: bool = True) -> socket.socket | None:
    """A socket that listens only at `host:port`, or None if this machine has no such address.

    torch's own stores listen on every interface; they take over this socket as `master_listen_fd`. `admits_loopback`:
    whether a loopback address is acceptable. Raises OSError when the port is in use, or the name does
    not resolve.
    """
    for family, _, _, _, socket_address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if is_loopback(str(socket_address[0])) and not admits_loopback:
            continue
        try:
            return socket.create_server(socket_address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return None


def find_free_port(host: str) -> int:
    """A port of an address of this machine at which nothing listens now."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def host_store_at(address: str) -> "TCPStore":
    """A key-value store of torch in this process, at a free port of an address of this machine."""
    listener = listen_at(address, 0)
    assert listener is not None, "this machine has this address"
    return host_store(listener, _STORE_SECONDS)


def host_store(listener: socket.socket, seconds: float) -> "TCPStore":
    """A key-value store of torch in this process, which answers at a listener. `seconds`: the timeout of a request."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()[:2]
    timeout = timedelta(seconds=seconds)
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return address.startswith("127.") or address == "::1"


def answers_as_store(line: socket.socket) -> bool:
    """Whether a torch TCPStore is at the other end of a new connection; sends the first request of torch's client.

    torch's client waits forever for a program that does not answer, and reports any other with C++ frames. The answer
    must arrive within the connection's timeout.
    """
    nonce = os.urandom(4)
    answer = b""
    with suppress(OSError):  # it closes the connection, or does not answer
        line.sendall(_VALIDATE + _PING + nonce)
        while len(answer) < len(nonce) and (part := line.recv(len(nonce) - len(answer))):
            answer += part
    return answer == nonce


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Call `ask()` in a thread with a timeout: torch's client waits forever if another program listens on the port.

    After a failure the thread may still be alive, so the process should end with `os._exit`.
    """
    answered: Queue[Answer | Exception] = Queue()

    def run() -> None:
        try:
            answered.put(ask())
        except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
            answered.put(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        answer = answered.get(timeout=seconds)
    except Empty:
        raise RuntimeError("no key-value store answered") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
