"""A Slurm cluster on this machine: one controller, three virtual nodes, real daemons from Debian's packages.

All its files are below one temporary folder. The nodes share this host: one address, different ports.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
NODES = ("n1", "n2", "n3")
_START_SECONDS = 60

# Jobs of `low` are preempted by `high` immediately, those of `grace` after one minute of grace time.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=grace Nodes=n1,n2 PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=wide Nodes=n1,n2,n3 PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def find_obstacle() -> str | None:
    """The reason why Slurm cannot run here; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@dataclass(frozen=True)
class SlurmCluster:
    """A running Slurm cluster; `env` is the environment of a client."""

    folder: Path
    env: dict[str, str]

    def call(self, *command: object) -> str:
        """Run a Slurm command, which must succeed; return its output."""
        words = list(map(str, command))
        answer = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert answer.returncode == 0, f"{words}: {answer.stderr}"
        return answer.stdout

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def await_state(self, job: str, *states: str, seconds: float = 90) -> str:
        """Wait until the job is in one of the states; start a requeued job without delay."""
        deadline = time.monotonic() + seconds
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}: {self.call('scontrol', 'show', 'job', job)}"
            if state == "PENDING" and self.field(job, "Reason") == "BeginTime":
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.3)
        return state


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Start the daemons, wait until all nodes are idle, and stop daemons and jobs at the end."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    daemons: list[subprocess.Popen[bytes]] = []
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    env |= {"PATH": _search_path(), "SLURM_CONF": str(folder / "slurm.conf")}
    try:
        _configure(folder)
        munge = ("--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket")
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        for command in (
            ("munged", "--foreground", *munge, *files),
            ("slurmctld", "-D", "-c"),
            *(("slurmd", "-D", "-N", node) for node in NODES),
        ):
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            if command[0] == "munged":
                _await(lambda: (folder / "munge.socket").exists(), folder)
        cluster = SlurmCluster(folder, env)
        _await(lambda: _count_idle(env) == len(NODES), folder)
        yield cluster
    finally:
        _stop(daemons, env)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    controller, *ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=8000 Gres=gpu:2"
        for name, port in zip(NODES, ports, strict=True)
    )
    text = _CONFIGURATION.format(host=host, controller=controller, folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    # Two GPUs for each node, which are empty files: Slurm grants what no node has.
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _count_idle(env: dict[str, str]) -> int:
    answer = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=wide", "--format=%T"],
        env=env, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return answer.stdout.split().count("idle")


def _await(condition, folder: Path) -> None:
    def read_logs() -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))

    wait_until(condition, _START_SECONDS, say=read_logs)


def _stop(daemons: list[subprocess.Popen[bytes]], env: dict[str, str]) -> None:
    """Stop the daemons, then all processes with this cluster's configuration in their environment: steps and jobs."""
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(5)
        daemon.kill()
        daemon.wait()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == env["SLURM_CONF"] and process.pid != os.getpid():
                process.kill()


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin"
