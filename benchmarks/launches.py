"""How long the host launches the embedding, the head and the loss of a microbatch, in layers of a model.

    python benchmarks/launches.py [--rounds 3]

Trains models of hardly any size on two processes, with few and with many layers: what a microbatch takes is launched
rather than computed. The difference between the models is the time of layers, what remains is outside the layers. It is
`head_launches` in planner/rates.py. A pipeline is trained as well: its layers have the hooks of `fully_shard`.
"""

import argparse
import json
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROCESSES, FEW, MANY = 2, 2, 6  # layers of a process
MICROBATCHES, STEPS, SKIPPED = 32, 16, 3


def write_recipe(path):
    recipe = {
        "run": {"name": path.stem},
        "model": {
            "config": {
                "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1,
                "num_key_value_heads": 1, "max_position_embeddings": 16,
            },
        },
        "tokenizer": "bytes",
        "data": {"train": pydoc_data.topics.__file__, "sequence_len": 16},
        "train": {
            "micro_batch_size": 1, "precision": "fp32", "compile": False, "eval_every": None, "log_every": 100,
            "activation_checkpointing": "none", "steps": STEPS,
        },
        "optim": {"learning_rate": 1e-3},
    }  # fmt: skip
    path.write_text(json.dumps(recipe))


def measure(path, pipelined, layers):
    """Seconds of a microbatch with so many layers on each process: the median over the steps."""
    copies = 1 if pipelined else PROCESSES
    settings = [
        f"parallel={{pp: {PROCESSES}}}" if pipelined else "parallel=ddp",
        f"train.global_batch_size={MICROBATCHES * copies}",
        f"model.config.num_hidden_layers={layers * PROCESSES if pipelined else layers}",
    ]
    command = [sys.executable, "-m", "echelon", "train", path.name, "--nproc", str(PROCESSES), "--fresh", *settings]
    subprocess.run(command, cwd=path.parent, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (path.parent / "runs" / path.stem / "metrics.jsonl").read_text().splitlines())
    seconds = [row["step_seconds"] for row in rows if row["kind"] == "train"]
    return statistics.median(seconds[SKIPPED:]) / MICROBATCHES


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    heads = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches.json"
        write_recipe(path)
        for _ in range(rounds):
            few, many, stage, longer = (
                measure(path, pipelined, layers) for pipelined in (False, True) for layers in (FEW, MANY)
            )
            launch = (many - few) / (MANY - FEW)
            heads.append((few - FEW * launch) / launch)
            piped = (longer - stage) / (MANY - FEW)
            rest = stage - FEW * piped - heads[-1] * launch
            print(
                f"a layer {1e3 * launch:.2f} ms, in a pipeline {1e3 * piped:.2f} ms; embedding, head and loss "
                f"{heads[-1]:.2f} layers; a pipeline's stage takes {1e3 * rest:.2f} ms more",
                flush=True,
            )
    print(f"median: head_launches {statistics.median(heads):.2f}")


if __name__ == "__main__":
    main()
