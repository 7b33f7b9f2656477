"""What a quorum costs in a step while nothing is lost, beside the same plan whose processes start again.

    python benchmarks/quorum_cost.py [--rounds 5] [--before SRC]

Trains two Llamas by `echelon train`: one whose step is short, so that a cost in milliseconds shows, and one whose step
is long. The sides run in turns, so that a drift of the machine's speed affects all. A round gives the median step of
each side; the results are the medians over rounds, with their range, and the median over rounds of the time that a
quorum takes more than every_step in the same round. `--before` names the `src` folder of another checkout, whose quorum
takes turns as well.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import describe_machine

ROOT = Path(__file__).parents[1]
OVERRIDES = [
    "tokenizer=bytes", "train.global_batch_size=16", "train.eval_every=100000", "checkpoint.every=100000",
    "train.log_every=50", "optim.warmup=0",
]  # fmt: skip
SIZES = {
    "short steps": [
        "model.config.hidden_size=64", "model.config.intermediate_size=172", "model.config.num_hidden_layers=2",
        "data.sequence_len=64", "train.steps=80",
    ],
    "long steps": [
        "model.config.hidden_size=128", "model.config.intermediate_size=344", "model.config.num_hidden_layers=4",
        "data.sequence_len=128", "train.steps=40",
    ],
}  # fmt: skip
WARMUP = 10
QUORUM = "fault.on_lost_process=continue"
PLANS = {
    "ddp, 2 processes": (2, ["parallel=ddp"], ["parallel=ddp", QUORUM]),
    "fsdp, 2 x 2 processes": (4, ["parallel={dp_replicate: 2, dp_shard: 2}"], ["parallel=fsdp", QUORUM]),
}


def median_step(processes, overrides, source):
    """Milliseconds from one step to the next."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        prepared = f"data.prepared_dir={ROOT}/runs/prepared-quorum"
        shown = [f"run.dir={folder}/run", prepared, *OVERRIDES, *overrides]
        command = [sys.executable, "-m", "echelon", "train", str(ROOT / "benchmarks/stdlib.yaml"), *shown]
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, "--nproc", str(processes)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_seconds"] for row in rows if row["kind"] == "train" and row["step"] > WARMUP]
    return 1e3 * statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path)
    given = parser.parse_args()
    source = ROOT / "src"
    print(f"{describe_machine('torch', 'transformers')}; ms a step, median of {given.rounds} rounds (least to most)")
    for (name, (processes, plain, quorum)), (size, model) in itertools.product(PLANS.items(), SIZES.items()):
        sides = {"every_step": (plain, source), "quorum": (quorum, source)}
        if given.before:
            sides["quorum before"] = (quorum, given.before)
        found = {side: [] for side in sides}
        for _ in range(given.rounds):
            for side, (overrides, where) in sides.items():
                found[side].append(median_step(processes, [*model, *overrides], where))
        for side, times in found.items():
            ratios = [own / base for own, base in zip(times, found["every_step"], strict=True)]
            more = 100 * (statistics.median(ratios) - 1)
            shown = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}), {more:+.1f} %"
            print(f"{name}, {size}, {side}: {shown}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
