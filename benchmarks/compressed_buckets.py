"""How much shorter steps are because compressed gradients are sent beside the backward pass, over a link.

    python benchmarks/compressed_buckets.py [--rounds N] [--megabits N]

Trains a Llama of 25 million parameters on two processes, each on a machine of its own (a network namespace, so as root
on Linux), twice for each method in every round: as echelon does it, and with a backward pass that waits for the sum of
each bucket of gradients. Prints the medians of the steps, and their ratio over the rounds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.reduction.reducer import Buckets
from measuring import describe_machine, spread

ROOT = Path(__file__).parents[1]
STEPS, WARM_UPS = 10, 3
METHODS = ("bf16", "powersgd", "topk", "sign")
OVERRIDES = [
    "model.config.hidden_size=512", "model.config.intermediate_size=1376", "model.config.num_hidden_layers=8",
    "train.global_batch_size=8", f"train.steps={STEPS}", "optim.warmup=2", "train.eval_every=100000",
    "train.compile=false", "checkpoint.every=100000", "evaluate.batches=1",
]  # fmt: skip


class Waiting(CausalLM):
    """Next-token prediction in a process whose backward pass waits for the sum of each bucket."""

    def __init__(self, config):
        sum_beside = Buckets.sum

        def sum_first(self, *arguments):
            done = sum_beside(self, *arguments)
            done.wait()
            return done

        Buckets.sum = sum_first


def median_step(method, is_beside, megabits):
    """The median seconds of a step after the first ones."""
    from slow_link import train_over_link

    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        chosen = [] if is_beside else [f"objective={json.dumps({'name': 'compressed_buckets:Waiting'})}"]
        shown = [
            f"run.dir={folder}/run", f"data.prepared_dir={ROOT}/runs/prepared",
            f"sync={json.dumps({'compress': {'method': method}})}", *chosen, *OVERRIDES,
        ]  # fmt: skip
        command = [sys.executable, "-m", "echelon", "train", str(ROOT / "benchmarks/stdlib.yaml"), *shown]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        seconds = train_over_link(command, folder, megabits, environment=os.environ | {"PYTHONPATH": path})
    return statistics.median(seconds[WARM_UPS:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabits", type=int, default=400)
    given = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    pairs = {method: [] for method in METHODS}
    for number in range(given.rounds):
        for method in METHODS:
            order = (True, False) if number % 2 == 0 else (False, True)
            seconds = {is_beside: median_step(method, is_beside, given.megabits) for is_beside in order}
            pairs[method].append((seconds[True], seconds[False]))
    print(f"{describe_machine('torch')}; {given.megabits} Mbit/s, {given.rounds} rounds")
    print("\n| Method | Step, s: sent beside the backward pass | Waiting for each bucket | Waiting / beside |")
    print("|---|---|---|---|")
    for method, found in pairs.items():
        beside, waiting = (spread(side, ".2f") for side in zip(*found, strict=True))
        print(f"| {method} | {beside} | {waiting} | {spread([other / one for one, other in found], '.2f')} |")


if __name__ == "__main__":
    main()
