"""A real Ray cluster on the machines of `namespaces.py`: a head that runs no agents, and one Ray node per machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.namespaces import Machine

DASHBOARD_PORT = 8265
_STORE_BYTES = str(80 * 2**20)


def ray_missing() -> str | None:
    """The reason to skip tests with Ray; None if it is installed beside this Python."""
    if find_spec("ray") is None or not _program().exists():
        return "ray is not installed; run make launchers, or pip install 'ray[default]'"
    return None


def _program() -> Path:
    return Path(sys.executable).with_name("ray")


@dataclass
class RayCluster:
    """The cluster: its head, and the Ray nodes that run now, by machine name."""

    head: Machine
    folder: Path
    nodes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The address of its dashboard."""
        return f"http://{self.head.address}:{DASHBOARD_PORT}"

    def start_node(self, machine: Machine) -> None:
        """Add a machine with one CPU core, of which a job may ask two halves; with the head's, start the cluster."""
        is_head = machine is self.head
        port = f"{self.head.address}:6379"
        place = ["--head", "--port=6379", "--dashboard-host=0.0.0.0", f"--temp-dir={self.folder}"]
        words = place if is_head else [f"--address={port}", '--resources={"half": 2}']
        words += [f"--node-ip-address={machine.address}", f"--num-cpus={0 if is_head else 1}"]
        words += [f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats", "--block"]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"PATH": path, "RAY_DISABLE_MEMORY_MONITOR": "1", "ON_THIS_MACHINE": machine.name}
        environment.pop("PYTHONPATH", None)  # nothing of the cluster needs echelon but the agents
        with (self.folder / f"{machine.name}.log").open("a") as log:
            self.nodes[machine.name] = machine.start(
                [str(_program()), "start", *words], env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def kill_node(self, machine: Machine) -> None:
        """Kill everything on a machine, as a power loss does."""
        machine.kill()
        self.nodes.pop(machine.name).wait(30)

    def await_nodes(self, seconds: float = 120) -> None:
        """Wait until the cluster counts as many living nodes as were started."""
        until = time.monotonic() + seconds
        while (count := self._count_alive()) != len(self.nodes):
            assert time.monotonic() < until, f"{count} of {len(self.nodes)} Ray nodes: {self._read_logs()}"
            time.sleep(0.5)

    def _count_alive(self) -> int:
        place = f"{self.address}/nodes?view=summary"
        code = f"import urllib.request as r; print(r.urlopen({place!r}, timeout=5).read().decode())"
        probe = self.head.start([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        out = probe.communicate(timeout=60)[0]
        if probe.returncode:
            return 0
        rows = json.loads(out)["data"]["summary"]
        return sum(row["raylet"]["state"] == "ALIVE" for row in rows)

    def _read_logs(self) -> str:
        return "".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))


@contextmanager
def ray_cluster(network: Sequence[Machine]) -> Iterator[RayCluster]:
    """Ray on these machines, of which the first is the head. The machines' own end removes its processes."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets need a short path
    cluster = RayCluster(network[0], folder)
    try:
        for machine in network:
            cluster.start_node(machine)
            cluster.await_nodes()  # one by one: they share /tmp, where two would take the same socket
        yield cluster
    finally:
        for machine in network:
            machine.kill()
        shutil.rmtree(folder, ignore_errors=True)
