"""Runs whose two processes are on machines of their own, network namespaces, with a slow link between them.

As root on Linux.
"""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.delayed_link import delayed
from tests.namespaces import machines

PROCESSES = 2


def train_over_link(command, folder, megabits, latency_seconds=0.0, environment=None):
    """Run an `echelon train` command, one process on each machine; return the seconds of each step.

    `folder`: the command's run folder is FOLDER/run. `megabits`: what each machine sends in a second at most.
    `latency_seconds`: how much later each packet arrives. `environment`: of the processes; None: this one's.
    """
    with machines(PROCESSES, Path(folder)) as network:
        place = ["--nproc", "1", "--nodes", str(PROCESSES), "--rendezvous", f"{network[0].name}:29400"]
        for machine in network:
            machine.slow(megabits)
        with delayed(*network, latency_seconds) if latency_seconds else nullcontext():
            agents = [machine.start([*command, *place], environment) for machine in network]
            codes = [agent.wait() for agent in agents]
    if any(codes):
        raise subprocess.SubprocessError(f"echelon train failed over the link: {command}")
    rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return [row["step_seconds"] for row in rows if row["kind"] == "train"]
