"""What the loss of a process costs with `fault.on_lost_process: replace` and by a restart, and what snapshots cost.

    python benchmarks/lost_processes.py [--rounds 5] [--part cost|losses] [--snapshot-every 5]

A small Llama is trained by `echelon train` on two processes under fsdp, as it is ("restart"), and with lost processes
replaced and a snapshot every few steps. The sides run in turns, so that a drift of the machine's speed affects both.

`losses`: rank 1 is killed 50 steps after the newest checkpoint. Seconds from there to the next row of metrics.jsonl,
and to the row after the last step before the loss: then all steps that were lost are done again.
`cost`: nothing is lost; the mean time of a step, the steps with snapshots included, on the wall and of the processors.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import describe_machine

ROOT = Path(__file__).parents[1]
NEVER, CHECKPOINT = 100_000, 60
OVERRIDES = [
    "tokenizer=bytes", "parallel=fsdp", f"train.eval_every={NEVER}", "train.log_every=50", "optim.warmup=0",
    "train.global_batch_size=16", "data.sequence_len=128", "model.config.hidden_size=256",
    "model.config.intermediate_size=688", "model.config.num_hidden_layers=4",
]  # fmt: skip
SIDES = {
    "restart": [],
    "replace": ["fault.on_lost_process=replace"],
}
FIRST, MEASURED = 40, 200


class Run:
    """A run of one side in a folder of its own."""

    def __init__(self, folder, overrides):
        shown = [f"run.dir={folder}/run", f"data.prepared_dir={ROOT}/runs/prepared-losses", *OVERRIDES, *overrides]
        command = [sys.executable, "-m", "echelon", "train", str(ROOT / "benchmarks/stdlib.yaml"), *shown]
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.folder = Path(folder) / "run"
        self._output = Path(folder) / "output"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--nproc", "2"], env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def rows(self, name="metrics"):
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last_step(self):
        return max((row["step"] for row in self.rows() if row["kind"] == "train"), default=0)

    def until(self, holds):
        while not holds():
            assert self._process.poll() is None, self._output.read_text()[-2000:]
            time.sleep(0.01)

    def pids(self):
        starts = [row for row in self.rows("events") if row["event"] in ("start", "resume")]
        return starts[-1]["pids"]

    def kill_rank(self, rank):
        os.kill(self.pids()[str(rank)], signal.SIGKILL)

    def processor_seconds(self):
        """Of all ranks so far, in Python and in the kernel."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split() for pid in self.pids().values()]
        return sum(int(found[11]) + int(found[12]) for found in fields) / os.sysconf("SC_CLK_TCK")

    def end(self):
        assert self._process.wait() in (0, 3), self._output.read_text()[-2000:]

    def stop(self):
        self._process.terminate()
        self.end()


def lose_one(folder, overrides):
    """Seconds from a loss to the next row, and until the lost steps are done again; the steps that were lost."""
    run = Run(folder, [*overrides, "train.steps=1000", f"checkpoint.every={CHECKPOINT}"])
    run.until(lambda: run.last_step() >= CHECKPOINT + 50)
    last, num_starts = run.last_step(), len(run.rows("events"))
    began = time.monotonic()
    run.kill_rank(1)
    run.until(lambda: any(row["event"] == "resume" for row in run.rows("events")[num_starts:]))
    [resumed] = [row["step"] for row in run.rows("events")[num_starts:] if row["event"] == "resume"]
    run.until(lambda: resumed < run.last_step())
    going_on = time.monotonic() - began
    run.until(lambda: run.last_step() > last)
    back = time.monotonic() - began
    run.stop()
    return going_on, back, last - resumed


def mean_step(folder, overrides):
    """Milliseconds of a step on the wall, and of the processors; means over a whole number of snapshots.

    The time of a step in metrics.jsonl does not include what is done between two steps.
    """
    run = Run(folder, [*overrides, f"train.steps={FIRST + MEASURED + 5}", f"checkpoint.every={NEVER}"])
    run.until(lambda: run.last_step() >= FIRST)
    began, spent, first = time.monotonic(), run.processor_seconds(), run.last_step()
    run.until(lambda: run.last_step() >= FIRST + MEASURED)
    seconds, spent, last = time.monotonic() - began, run.processor_seconds() - spent, run.last_step()
    run.end()
    return 1e3 * seconds / (last - first), 1e3 * spent / (last - first)


def in_turns(measure, rounds):
    """What a function measures of each side, in each round."""
    found = {side: [] for side in SIDES}
    (ROOT / "runs").mkdir(exist_ok=True)
    for _ in range(rounds):
        for side, overrides in SIDES.items():
            with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
                found[side].append(measure(folder, overrides))
            print(f"{side}: {found[side][-1]}; load {os.getloadavg()[0]:.1f}", flush=True)
    return found


def show(values):
    """A median with its range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["cost", "losses"])
    parser.add_argument("--snapshot-every", type=int, default=5, help="steps")
    given = parser.parse_args()
    SIDES["replace"].append(f"checkpoint.snapshot_every_steps={given.snapshot_every}")
    print(f"{describe_machine('torch', 'transformers')}; median of {given.rounds} rounds (least to most)")
    if given.part != "cost":
        for side, found in in_turns(lose_one, given.rounds).items():
            going_on, back, lost = zip(*found, strict=True)
            print(f"{side}: s to the next row {show(going_on)}, s until back {show(back)}, steps lost {show(lost)}")
    if given.part != "losses":
        found = in_turns(mean_step, given.rounds)
        for side, rounds in found.items():
            for number, what in enumerate(("on the wall", "of the processors")):
                times, bases = ([times[number] for times in these] for these in (rounds, found["restart"]))
                more = [100 * (own / base - 1) for own, base in zip(times, bases, strict=True)]
                print(f"{side}: {show(times)} ms a step {what}, {show(more)} % more than restart")


if __name__ == "__main__":
    main()
