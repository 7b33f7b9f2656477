"""The machines of a job as each knows them before the rendezvous, and this machine's own address."""

import fcntl
import logging
import os
import re
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.sockets import is_loopback, listen_at

logger = logging.getLogger(__name__)

_NAME_SECONDS = 600.0
_LOOK_SECONDS = 1.0
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class HostGroup:
    """`min_nodes` to `max_nodes` machines that meet at `host:port`, where one of them, the coordinator, listens.

    `coordinates`: whether this machine is the coordinator; None: it is if the address is its own. `interface`: the
    network interface to use; None: the one that reaches the coordinator. `shares_files`: whether every machine sees the
    same run folder. `name`: this machine's name; ranks are assigned to the coordinator first, then in the order of the
    names, else of the addresses. `num_spares`: so many machines more wait, and take the places of lost ones.
    `lives_on`: whether the processes that are left stay, and the job may end well without a lost machine: with a
    quorum, and where lost processes are replaced. `store_name`: of a job whose store is an etcd at `host:port`, outside
    of the job, its name there; None: one of the machines hosts the store.
    """

    min_nodes: int
    max_nodes: int
    host: str
    port: int
    coordinates: bool | None = None
    interface: str | None = None
    shares_files: bool = True
    name: str | None = None
    num_spares: int = 0
    lives_on: bool = False
    store_name: str | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the job has a single machine."""
        return self.max_machines == 1

    @property
    def max_machines(self) -> int:
        """Those that train, and those that wait."""
        return self.max_nodes + self.num_spares

    @property
    def is_elastic(self) -> bool:
        """Whether machines may leave and join, and all start again without or with them."""
        return self.min_nodes < self.max_nodes and not self.lives_on

    @property
    def may_leave(self) -> bool:
        """Whether a machine that is asked to stop leaves, and the others go on."""
        return self.is_elastic or bool(self.num_spares and not self.lives_on)

    @property
    def endpoint(self) -> str:
        """The rendezvous endpoint in torch's format."""
        return join_endpoint(self.host, self.port)


THIS_MACHINE = HostGroup(1, 1, "127.0.0.1", 0)
"""The group of a single machine."""


def join_endpoint(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_group(nodes: str, rendezvous: str, interface: str | None = None) -> HostGroup:
    """The group that `--nodes` and `--rendezvous` describe. Raises ConfigError."""
    numbers = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*)|\+([1-9]\d*))?", nodes)
    if numbers is None or int(numbers[1]) > int(numbers[2] or numbers[1]):
        raise ConfigError(
            f"--nodes {nodes} is neither a number of machines, nor MIN:MAX, nor N+SPARES; use --nodes 2, 1:4 or 4+1."
        )
    address = re.fullmatch(r"(etcd://)?\[?([A-Za-z0-9_.:-]+?)\]?:(\d{1,5})(?:/([A-Za-z0-9_.-]+))?", rendezvous)
    if address is None or not 0 < int(address[3]) < 65536 or (address[1] is None) != (address[4] is None):
        raise ConfigError(
            f"--rendezvous {rendezvous} is neither HOST:PORT nor etcd://HOST:PORT/NAME; use the first machine's, such "
            "as node-1:29400, or that of an etcd and a name for this job."
        )
    least, most, spares = int(numbers[1]), int(numbers[2] or numbers[1]), int(numbers[3] or 0)
    host, port, name = address[2], int(address[3]), address[4]
    return HostGroup(least, most, host, port, interface=interface, num_spares=spares, store_name=name)


def await_name(group: HostGroup) -> None:
    """Wait until the coordinator's name resolves. For a pod this can take minutes.

    Raises LaunchError after ten minutes.
    """
    until = time.monotonic() + _NAME_SECONDS
    is_logged = False
    while True:
        try:
            _resolve(group)
            return
        except LaunchError as error:
            if time.monotonic() > until:
                raise
            if not is_logged:
                logger.info(f"{str(error).rstrip('.')}; waiting up to {_NAME_SECONDS / 60:.0f} minutes")
            is_logged = True
            time.sleep(_LOOK_SECONDS)


def find_own_address(group: HostGroup) -> str:
    """This machine's address for the others: that of the interface, else the source address of its route to the
    coordinator.

    A single machine uses loopback, which needs no name resolution or firewall rule and is not reachable from outside.
    Raises LaunchError if the coordinator's name does not resolve, ConfigError for an unknown interface.
    """
    if group.is_alone:
        return THIS_MACHINE.host
    if group.interface is not None:
        if (address := address_of(group.interface)) is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(f"--interface {group.interface} has no address on this machine; it has {names}.")
        return address
    family, target = _resolve(group)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # no packet is sent: the kernel only chooses the route
        try:
            probe.connect(target)
        except OSError as error:
            raise LaunchError(f"this machine has no route to {group.host} ({error.strerror}).") from error
        return str(probe.getsockname()[0])


def find_interface(address: str) -> str | None:
    """The interface with this address; None if it cannot be found."""
    if is_loopback(address):
        return "lo0" if sys.platform == "darwin" else "lo"
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def open_coordinator(group: HostGroup) -> socket.socket | None:
    """The listening socket for the rendezvous store if this machine is the coordinator, else None.

    Listens only at the coordinator's address. If `coordinates` is set and that address is not this machine's, or other
    machines cannot reach it, listens at this machine's own address instead. If the port is in use, this machine is not
    the coordinator; if `coordinates` is set, raises LaunchError.
    """
    if group.coordinates is False or group.store_name is not None:
        return None
    try:
        server = listen_at(group.host, group.port)
        is_elsewhere = server is None and group.coordinates is True
        # /etc/hosts may map this machine's name to a loopback address.
        is_hidden = server is not None and group.interface is not None and is_loopback(server.getsockname()[0])
        if server is not None and is_hidden:
            server.close()
        return listen_at(find_own_address(group), group.port) if is_elsewhere or is_hidden else server
    except OSError as error:
        if not group.coordinates:
            return None
        raise LaunchError(
            f"this machine cannot listen at {group.endpoint}, the rendezvous endpoint ({error.strerror}); end the "
            "program that uses the port, or choose another one."
        ) from error


def is_coordinator(group: HostGroup) -> bool:
    """Whether this machine is the coordinator, before the machines have met.

    If the group does not specify it, this is the machine with the coordinator's address, if no process listens there.
    """
    if group.is_alone or group.coordinates:
        return True
    if (found := open_coordinator(group)) is not None:
        found.close()
    return found is not None


def limit_silence_of(port: int | None, seconds: float) -> None:
    """Make this process's connections to this port of other machines, or to any, fail after so long without an answer.

    torch's store waits for an answer forever, as gloo does, and neither a broken link nor a machine without power
    closes connections. Has no effect on systems without a list of open files in /proc.
    """
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # not a connection, or closed meanwhile
            copy = os.dup(int(entry.name))
            try:
                line = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with line:
                is_tcp = line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM
                if is_tcp and port in (None, line.getpeername()[1]):
                    limit_silence(line, seconds)


def limit_silence(line: socket.socket, seconds: float) -> None:
    """Make one connection fail after this many seconds without an answer of the other machine's kernel."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))  # for unacknowledged data
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for an idle connection
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 3)))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 3)))


def _resolve(group: HostGroup) -> tuple[int, tuple[str, int]]:
    try:
        addresses = socket.getaddrinfo(group.host, group.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"the name {group.host} does not resolve on this machine ({error.strerror}).") from error
    family, _, _, _, target = addresses[0]
    return family, (str(target[0]), int(target[1]))


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none or cannot be queried."""
    if not Path("/proc/net").exists():  # the ioctl number is that of Linux
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
