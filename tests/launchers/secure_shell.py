"""Real sshd on the machines of `namespaces.py`, with temporary keys."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.namespaces import Machine
from tests.waiting import wait_until

_SSHD = "/usr/sbin/sshd"


def ssh_missing() -> str | None:
    """The reason to skip tests with sshd, if it is missing."""
    present = Path(_SSHD).exists() and shutil.which("ssh") and shutil.which("ssh-keygen")
    return None if present else "no sshd here; install openssh-server"


def serve_ssh(network: Sequence[Machine], folder: Path) -> list[str]:
    """Start sshd on each machine; return the options with which `ssh` connects, without files of this user."""
    folder.mkdir()
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "PidFile": "none",
        "PermitRootLogin": "yes", "UsePAM": "no", "PasswordAuthentication": "no",
        "SetEnv": f"HOME={folder}",  # not this user's profile, because a kill would leave its lock files behind
    }  # fmt: skip
    config = folder / "sshd_config"
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    for machine in network:
        with (folder / f"sshd-{machine.name}.log").open("w") as log:
            machine.start([_SSHD, "-D", "-e", "-f", str(config)], stderr=log)
    for machine in network:
        _await_port(machine)
    known = folder / "known_hosts"
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    known.write_text("".join(f"{machine.name},{machine.address} {key}\n" for machine in network))
    return ["-F", "none", "-i", str(folder / "user"), "-o", f"UserKnownHostsFile={known}", "-o", "LogLevel=ERROR"]


def _await_port(machine: Machine) -> None:
    wait_until(lambda: b"\n" in _greeting(machine), 20, say=lambda: f"no sshd on {machine.name}")


def _greeting(machine: Machine) -> bytes:
    code = f"import socket; print(socket.create_connection(('{machine.address}', 22), 2).recv(100))"
    probe = machine.start(["python3", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return probe.communicate(timeout=20)[0]
