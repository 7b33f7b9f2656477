"""What a slow process costs the others, under every_step and under parameter servers, and the loss that each pays.

    python benchmarks/slow_worker.py OUT [--only NAME ...]

Trains a small Llama on four processes twice for each method: with equal processes, and with a last one that takes three
times as long. A share of a batch takes 0.2 seconds (0.6 in the slow process), of which the most is slept, so that the
processes do not compete for cores. Appends each result to OUT.json, so that it can be stopped and continued; then
writes OUT.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.learn.objectives.causal_lm import CausalLM

ROOT = Path(__file__).parents[1]
PROCESSES, STEPS, SECONDS, TIMES = 4, 150, 0.2, 3
METHODS = {
    "every_step": {},
    "servers, max_staleness 0": {"name": "parameter_server"},
    "servers, max_staleness 4": {"name": "parameter_server", "max_staleness": 4},
    "servers, max_staleness null": {"name": "parameter_server", "max_staleness": None},
}
OVERRIDES = [
    "model.config.hidden_size=64", "model.config.intermediate_size=172", "model.config.num_hidden_layers=2",
    "tokenizer={train: {vocab_size: 512}}", "data.sequence_len=64", f"train.steps={STEPS}",
    "train.global_batch_size=16", "train.micro_batch_size=4", "optim.warmup=20",
    "train.eval_every=100000", "checkpoint.every=100000", "train.log_every=50", "evaluate.batches=20",
]  # fmt: skip


class Paced(CausalLM):
    """Next-token prediction whose shares take at least some seconds; each process writes when it began one."""

    def __init__(self, config, folder, times):
        self._folder, self._times, self._began = Path(folder), times, None

    def count(self, batch):
        if torch.is_grad_enabled():
            rank = dist.get_rank()
            seconds = SECONDS * (self._times if rank == dist.get_world_size() - 1 else 1)
            now = time.monotonic()
            if self._began is not None:
                time.sleep(max(0.0, self._began + seconds - now))
            with (self._folder / f"{rank}.txt").open("a") as file:
                file.write(f"{(began := time.monotonic())}\n")
            self._began = began
        return super().count(batch)


def measure(sync, times):
    """The held-out loss, and the shares per second of each process."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        objective = {"name": "slow_worker:Paced", "options": {"folder": folder, "times": times}}
        shown = [
            f"run.dir={folder}/run", f"data.prepared_dir={ROOT}/runs/prepared-slow", f"sync={json.dumps(sync)}",
            f"objective={json.dumps(objective)}", *OVERRIDES,
        ]  # fmt: skip
        command = [sys.executable, "-m", "echelon", "train", str(ROOT / "benchmarks/stdlib.yaml"), *shown]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--nproc", str(PROCESSES)], check=True, env=environment)
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
        rates = []
        for rank in range(PROCESSES):
            began = [float(line) for line in (Path(folder) / f"{rank}.txt").read_text().split()]
            rates.append((len(began) - 1) / (began[-1] - began[0]))
    [evaluated] = [row for row in rows if row["kind"] == "eval"]
    return {"loss": evaluated["loss"], "rates": rates}


def render_table(results):
    lines = [
        f"{STEPS} steps on {PROCESSES} processes; the last one takes {TIMES} times as long in the second run of each "
        "method. Shares per second are those of another process, the mean of three.",
        "",
        "| Method | Shares per second | Beside a slow process | Kept | Held-out loss | Beside a slow process |",
        "|---|---|---|---|---|---|",
    ]
    for name in METHODS:
        runs = [results.get(f"{name}, {times}x") for times in (1, TIMES)]
        if None not in runs:
            rates = [sum(run["rates"][:-1]) / (PROCESSES - 1) for run in runs]
            lines.append(
                f"| {name} | {rates[0]:.2f} | {rates[1]:.2f} | {rates[1] / rates[0]:.0%} | "
                f"{runs[0]['loss']:.4f} | {runs[1]['loss']:.4f} |"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    given = parser.parse_args()
    stored = given.out.with_suffix(".json")
    results = json.loads(stored.read_text()) if stored.exists() else {}
    (ROOT / "runs").mkdir(exist_ok=True)
    for name in given.only:
        for times in (1, TIMES):
            if (key := f"{name}, {times}x") not in results:
                results[key] = measure(METHODS[name], times)
                stored.write_text(json.dumps(results, indent=1))
    given.out.with_suffix(".md").write_text(render_table(results))
    print(render_table(results))


if __name__ == "__main__":
    main()
