"""Start-up: from the command to the first step of a prepared run, and from a killed rank to the next step.

Each round starts `benchmarks/stdlib.yaml` on two processes with prepared data, waits for the first row of metrics.jsonl
and for a checkpoint, kills rank 1, waits for the first row after the restart, and stops the run. Processor
seconds are those of all processes of the command; they depend less on other work on the machine than the time does.

`--before SRC` also runs the `src` folder of another checkout, in alternation.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = ("checkpoint.every=5", "train.eval_every=null", "train.log_every=1")
QUANTITIES = ("start, s", "start, processor s", "restart, s", "restart, processor s")
LOOK_SECONDS = 0.01


class Run:
    """One run of the recipe with the source folder `src`, in `folder`."""

    def __init__(self, src: Path, folder: Path, name: str) -> None:
        self.path = folder / "runs" / name
        self.began = time.time()
        recipe = str(ROOT / "benchmarks" / "stdlib.yaml")
        command = [sys.executable, "-m", "echelon", "train", recipe, "--nproc", "2", f"run.dir={self.path}", *OVERRIDES]
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": str(src)},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def lines(self, name: str) -> list[dict]:
        """The rows of a file of the run."""
        path = self.path / name
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def wait(self, name: str, is_there) -> float:
        """Wait until the rows of a file fulfil a condition; return the time."""
        while not is_there(self.lines(name)):
            assert self.process.poll() is None, f"the run has ended; see {self.path}/console.log"
            time.sleep(LOOK_SECONDS)
        return time.time()

    def processor_seconds(self) -> float:
        """The user and system time of the command and its descendants until now."""
        parent = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (parent, *parent.children(recursive=True))]
        ended = parent.cpu_times()
        return sum(each.user + each.system for each in times) + ended.children_user + ended.children_system

    def stop(self) -> None:
        """End the run and all its processes."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def measure(src: Path, folder: Path) -> dict[str, float]:
    """Start, kill and restart once; return the seconds of each."""
    name = f"run-{time.time_ns()}"
    run = Run(src, folder, name)
    try:
        first = run.wait("metrics.jsonl", bool)
        started = run.processor_seconds()
        run.wait("events.jsonl", lambda rows: any(row["event"] == "checkpoint" for row in rows))
        before = run.processor_seconds()
        killed = time.time()
        os.kill(int((run.path / ".outcomes" / "pid-1").read_text()), signal.SIGKILL)
        resumed_at = run.wait("events.jsonl", lambda rows: any(row["event"] == "resume" for row in rows))
        row = next(row for row in run.lines("events.jsonl") if row["event"] == "resume")
        again = run.wait("metrics.jsonl", lambda rows: bool(rows) and rows[-1]["step"] > row["step"])
        after = run.processor_seconds()
    finally:
        run.stop()
    assert resumed_at <= again
    shutil.rmtree(run.path)
    return dict(zip(QUANTITIES, (first - run.began, started, again - killed, after - before), strict=True))


def prepare(folder: Path) -> None:
    """Prepare the data of the recipe."""
    recipe = str(ROOT / "benchmarks" / "stdlib.yaml")
    command = [sys.executable, "-m", "echelon", "data", "--prepare", recipe, f"run.dir={folder / 'runs' / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    arguments = parser.parse_args()
    sides = {"now": ROOT / "src"} if arguments.before is None else {"before": arguments.before, "now": ROOT / "src"}
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    try:
        prepare(folder)
        for src in sides.values():  # a warm page cache, and compiled Python files
            measure(src, folder)
        for index in range(arguments.rounds):
            for side in list(sides)[:: 1 if index % 2 == 0 else -1]:
                found[side].append(measure(sides[side].resolve(), folder))
    finally:
        shutil.rmtree(folder)
    versions = f"Python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    machine = f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the end"
    print(f"{versions}, {machine}, {arguments.rounds} rounds\n")
    print(f"| | {' | '.join(QUANTITIES)} |\n|---|{'---|' * len(QUANTITIES)}")
    for side, rounds in found.items():
        columns = [[each[quantity] for each in rounds] for quantity in QUANTITIES]
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in columns]
        print(f"| {side} | {' | '.join(cells)} |")
    if "before" in found:
        ratios = [
            [one[quantity] / other[quantity] for one, other in zip(found["before"], found["now"], strict=True)]
            for quantity in QUANTITIES
        ]
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in ratios]
        print(f"| before / now | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
