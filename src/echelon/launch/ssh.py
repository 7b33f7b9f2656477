"""Run commands on other machines with this machine's `ssh`."""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from echelon.ground.errors import ConfigError, LaunchError, MissingSettingError
from echelon.recipe.launch_sections import LaunchConfig

CONNECT_SECONDS = 10
"""Timeout of a connection."""

# ssh's exit code when the connection failed, not the command.
_NO_CONNECTION = 255
# Admits nothing that ssh or a shell would interpret as anything but a name.
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"
USER = r"[A-Za-z0-9_][A-Za-z0-9._@\\-]*"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Ssh:
    """How `ssh` is called: without prompts, and with the recipe's options."""

    options: tuple[str, ...] = ()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on the host; every argument arrives unchanged."""
        settings = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        return ["ssh", *settings, *self.options, "--", host, shlex.join(argv)]

    def run(self, host: str, argv: Sequence[str], seconds: float = 60.0) -> str:
        """Run a command and return its output. Raises LaunchError if it fails or the host cannot be reached."""
        command = self.command(host, argv)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                start_new_session=True,  # the caller handles Ctrl-C
            )
        except FileNotFoundError:
            raise LaunchError("ssh is not installed on this machine; install the OpenSSH client.") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{host} did not answer within {seconds:.0f} s.") from None
        if done.returncode == _NO_CONNECTION:
            raise LaunchError(
                f"ssh cannot reach {host}: {explain(done.stderr)}; `{shlex.join(self.command(host, ['true']))}` must "
                "work without a prompt."
            )
        if done.returncode != 0:
            raise LaunchError(f"{host}: {explain(done.stderr) or f'exit code {done.returncode}'}.")
        return done.stdout


def find_ssh(launch: LaunchConfig) -> Ssh:
    """The ssh settings of the recipe."""
    return Ssh(launch.torchrun.ssh_options)


def check_hosts(launch: LaunchConfig) -> None:
    """Raise ConfigError unless the hosts are valid names, each listed once."""
    hosts = launch.torchrun.hosts
    if not hosts:
        raise MissingSettingError(
            "launch.torchrun.hosts is empty; name the machines with --hosts a,b or in the recipe.",
            {"launch.torchrun.hosts": [f"SET-host-{number}" for number in range(1, launch.node_range[0] + 1)]},
        )
    for host in hosts:
        if "@" in host:
            raise ConfigError(
                f"launch.torchrun.hosts: {host} contains a user; set launch.torchrun.ssh_options=[-l, "
                f"{host.partition('@')[0]}], and write only {host.partition('@')[2]}."
            )
        if not re.fullmatch(HOST, host):
            raise ConfigError(
                f"launch.torchrun.hosts: {host!r} is neither a host name nor an IPv4 address; use letters, digits, "
                "dots, dashes and _, starting with a letter or digit."
            )
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise ConfigError(f"launch.torchrun.hosts names {twice} twice; give each machine once.")
    if len(hosts) > 1 and (local := {"localhost", "127.0.0.1"} & set(hosts)):
        raise ConfigError(
            f"launch.torchrun.hosts: {local.pop()} is a different machine on each host; use an address that the other "
            "hosts can reach."
        )


def on_each(hosts: Sequence[str], ask: Callable[[str], Answer]) -> dict[str, Answer | LaunchError]:
    """Call `ask` for all hosts in parallel; return each host's answer or error, in the order of the hosts."""

    def attempt(host: str) -> Answer | LaunchError:
        try:
            return ask(host)
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(max_workers=32) as pool:
        return dict(zip(hosts, pool.map(attempt, hosts), strict=True))


def explain(errors: str) -> str:
    """The last line of the error output, which has the reason; ssh's warnings come before it."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""
