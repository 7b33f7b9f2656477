"""The loss of a well-known setting: recipes/tinyshakespeare.yaml on one process and on two.

    python benchmarks/quality.py PATH/TO/tinyshakespeare.txt

Prints the loss on the last tenth of the text after 2000 steps, and the largest difference between the two loss curves.
nanoGPT reports 1.88 for its own model of this size (README, "I only have a macbook"). Takes about five minutes on two
cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "recipes" / "tinyshakespeare.yaml"


def train(text, folder, processes):
    run = folder / f"on-{processes}"
    overrides = [f"data.train.0.path={text}", f"run.dir={run}", "train.log_every=500"]
    command = [sys.executable, "-m", "echelon", "train", str(RECIPE), *overrides, "--nproc", str(processes)]
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    text = parser.parse_args().text.resolve()
    with tempfile.TemporaryDirectory() as folder:
        one, two = (train(text, Path(folder), processes) for processes in (1, 2))
    for name, rows in (("one process", one), ("two processes", two)):
        print(f"{name}: held-out loss {[row['loss'] for row in rows if row['kind'] == 'eval'][-1]:.4f}")
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a["kind"] == "train"]
    for last in (10, 100, 500, 2000):
        apart = max(abs(a["loss"] - b["loss"]) for a, b in pairs[:last])
        print(f"largest difference of training losses in the first {last} steps: {apart:.1e}")
    assert all(a["batch_hash"] == b["batch_hash"] for a, b in pairs), "the two runs fed different batches"


if __name__ == "__main__":
    main()
