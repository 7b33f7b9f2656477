"""Whether a lost process changes nothing but time on two GPUs: in a quorum, and with `fault.on_lost_process: replace`.

    python benchmarks/lost_gpus.py [SIDE ...] [--size tiny]

A small Llama is trained on two processes: undisturbed, and with a process killed by SIGKILL after step 30. Every row of
metrics.jsonl must be there once, with the batch of the undisturbed run and its loss up to rounding; with `replace` bit
for bit. The lost process must have returned without a restart. The exit code is 1 if one of these does not hold.

- *quorum*: two replicas of one process; the other one waits for its return (`sync.min_replicas: 2`), in a new group.
- *alone*: the same, and the other one goes on alone meanwhile.
- *replace-ddp*, *replace-fsdp*: a new process takes the place of the lost one; both go on from the newest snapshot.

`--size tiny` does the same on two processes of a CPU.
"""

import argparse
import os
import signal
import sys
import tempfile
import time

from echelon.run.folder.run_folder import RunFolder
from lost_processes import ROOT, Run
from measuring import describe_machine, measure_rows

STEPS, KILL_AT, TOLERANCE = {"full": 300, "tiny": 60}, 30, 1e-3
QUORUM = ["parallel=ddp", "fault.on_lost_process=continue", "sync.replicas=2"]
REPLACE = ["fault.on_lost_process=replace", "checkpoint.snapshot_every_steps=10"]
SIDES = {
    "quorum": ("ddp", [*QUORUM, "sync.min_replicas=2"]),
    "alone": ("ddp", QUORUM),
    "replace-ddp": ("ddp", ["parallel=ddp", *REPLACE]),
    "replace-fsdp": ("fsdp", ["parallel=fsdp", *REPLACE]),
}
UNDISTURBED = {}


def build_overrides(size, further):
    small = ["model.config.hidden_size=64", "model.config.intermediate_size=128"] if size == "tiny" else []
    fixed = ["train.precision=fp32", "train.deterministic=true", "checkpoint.every=1000"]
    return [*fixed, f"train.steps={STEPS[size]}", *small, *further]


def train(size, further, is_disturbed):
    """The rows of a run, its events, and the seconds from a loss to the next row."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        run, seconds = Run(folder, build_overrides(size, further)), 0.0
        if is_disturbed:
            run.until(lambda: run.last_step() >= KILL_AT)
            began, last = time.monotonic(), run.last_step()
            os.kill(RunFolder(run.folder).read_pids()[1], signal.SIGKILL)
            run.until(lambda: any(row["event"].endswith("_lost") for row in run.rows("events")))
            run.until(lambda: run.last_step() > last)
            seconds = time.monotonic() - began
        run.end()
        return [row for row in run.rows() if row["kind"] == "train"], run.rows("events"), seconds


def lose_one(side, size):
    """Print a row of the table. Raises AssertionError if the loss has changed something."""
    parallel, further = SIDES[side]
    if parallel not in UNDISTURBED:
        UNDISTURBED[parallel], _, _ = train(size, [f"parallel={parallel}"], False)
    rows, events, seconds = train(size, further, True)
    names, expected = [event["event"] for event in events], UNDISTURBED[parallel]
    assert "restart" not in names and "failure" not in names, f"{side}: the job has restarted: {names}"
    read, right = ([(row["step"], row["batch_hash"], row["tokens"]) for row in found] for found in (rows, expected))
    assert read == right, f"{side}: not every batch was read once"
    losses = zip(rows, expected, strict=True)
    largest = max(abs(row["loss"] - other["loss"]) / other["loss"] for row, other in losses)
    limit = TOLERANCE if side in ("quorum", "alone") else 0.0
    returned = "yes" if {"replica_joined", "process_lost"} & set(names) else "no"
    print(f"| {side} | {seconds:.1f} | {returned} | {len(rows)} | {largest:.1e} |")
    assert largest <= limit, f"{side}: a loss differs by {largest:.1e} of it, and may by {limit:g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="*", metavar="SIDE", default=list(SIDES))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    given = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    print(f"{describe_machine('torch', 'transformers')}\n")
    print("| side | s to the next row | returned | rows | largest difference of a loss |\n|---|---|---|---|---|")
    sys.exit(not measure_rows(given.sides, given.seconds, lambda side: lose_one(side, given.size)))


if __name__ == "__main__":
    main()
