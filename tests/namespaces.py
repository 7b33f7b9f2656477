"""Machines emulated by Linux network namespaces: separate addresses, host names and loopbacks, but shared files."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = "echelon-"
_NAMED = Path("/run/netns")
_HOSTS = Path("/etc/netns")
# Sets the machine's host name, then runs the command by exec, so that `start` returns the command's process id.
_ENTER = 'hostname "$0" && exec "$@"'
_NO_SUCH_CARD = "02:00:00:00:00:fe"


@dataclass(frozen=True)
class Machine:
    """A network namespace with an interface `eth0` to the switch; its commands start in `folder`."""

    name: str
    address: str
    namespace: str
    switch: str
    folder: Path

    def start(
        self, argv: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None, **popen: Any
    ) -> subprocess.Popen:
        """Start a command on this machine; the names of all machines resolve. `env` defaults to this process's."""
        inside = ["unshare", "--uts", "sh", "-c", _ENTER, self.name, *map(str, argv)]
        command = ["ip", "netns", "exec", self.namespace, *inside]
        return subprocess.Popen(command, env=env, cwd=cwd or self.folder, **popen)

    def cut(self) -> None:
        """Disconnect the machine: all packets are dropped, and connections stay open."""
        _ip("-n", self.switch, "link", "set", self.name, "down")

    def heal(self) -> None:
        """Reconnect the machine."""
        _ip("-n", self.switch, "link", "set", self.name, "up")

    def cut_from(self, other: "Machine") -> None:
        """Drop all packets to one other machine silently; connections to the others are unchanged."""
        _ip(
            "-n",
            self.namespace,
            "neigh",
            "replace",
            other.address,
            "lladdr",
            _NO_SUCH_CARD,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    def slow(self, megabits: int) -> None:
        """Limit the sending rate of this machine, in megabits per second."""
        limit = ["tbf", "rate", f"{megabits}mbit", "burst", "64kbit", "latency", "400ms"]
        _run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)

    def kill(self) -> None:
        """SIGKILL every process. The kernel still closes their connections; `cut` first to emulate a power loss."""
        deadline = time.monotonic() + 10
        while pids := _ip("netns", "pids", self.namespace).split():
            assert time.monotonic() < deadline, f"{self.name} does not die: {pids}"
            for pid in pids:
                _kill(int(pid))
            time.sleep(0.05)


@contextmanager
def machines(count: int, tmp_path: Path) -> Iterator[list[Machine]]:
    """`node-1` to `node-COUNT`, at 10.87.0.1 and so on; the switch is a namespace too, so nobody else sees them.

    `tmp_path` is where their commands start: the folder they share. All is removed in the end, with every process.
    """
    _remove_stale()
    tag = f"{_PREFIX}{os.getpid()}-{time.monotonic_ns() % 10**9}"
    switch = f"{tag}-switch"
    network = [
        Machine(f"node-{number}", f"10.87.0.{number}", f"{tag}-node-{number}", switch, tmp_path)
        for number in range(1, count + 1)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        names = "".join(f"{machine.address} {machine.name}\n" for machine in network)
        for machine in network:
            _connect(machine, names)
        yield network
    finally:
        for machine in network:
            if (_NAMED / machine.namespace).exists():
                machine.kill()
            _remove(machine.namespace)
        _remove(switch)


@functools.cache
def namespaces_allowed() -> str | None:
    """The reason to skip tests with machines; None if machines can be created."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc", "unshare", "hostname") if shutil.which(name) is None]:
        return f"no {', '.join(missing)} here; install iproute2, util-linux and hostname"
    try:
        with machines(1, Path("/")) as [machine]:
            probe = machine.start(["true"], stderr=subprocess.PIPE, text=True)
            reason = probe.communicate(timeout=30)[1]
            if probe.returncode != 0:
                return f"nothing can be started in a network namespace here: {reason.strip()}"
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    return None


def _connect(machine: Machine, names: str) -> None:
    hosts = _HOSTS / machine.namespace / "hosts"
    hosts.parent.mkdir(parents=True)
    hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    space = machine.namespace
    _ip("netns", "add", space)
    _ip("-n", machine.switch, "link", "add", machine.name, "type", "veth", "peer", "name", "eth0", "netns", space)
    _ip("-n", machine.switch, "link", "set", machine.name, "master", "bridge", "up")
    _ip("-n", space, "address", "add", f"{machine.address}/24", "dev", "eth0")
    _ip("-n", space, "link", "set", "lo", "up")
    _ip("-n", space, "link", "set", "eth0", "up")


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    shutil.rmtree(_HOSTS / namespace, ignore_errors=True)


def _remove_stale() -> None:
    """Remove what a killed test process has left behind."""
    for path in [*_NAMED.glob(f"{_PREFIX}*"), *_HOSTS.glob(f"{_PREFIX}*")]:
        owner = re.match(rf"{_PREFIX}(\d+)-", path.name)
        if owner and not Path("/proc", owner[1]).exists():
            for pid in subprocess.run(
                ["ip", "netns", "pids", path.name], capture_output=True, text=True
            ).stdout.split():
                _kill(int(pid))
            _remove(path.name)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
