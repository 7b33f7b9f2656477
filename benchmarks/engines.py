"""The same small work under the native engine and under each other one, side by side: tokens per second and memory.

    python benchmarks/engines.py OUT [--python ENGINE=PYTHON ...] [--rounds 3] [--steps 24] [--seconds N] [--size tiny]

Two processes on CPUs in fp32. In a round every row is one run of `echelon train`, one after the other; rounds repeat
them, every second one in reverse, so that a drift of the machine's speed affects all rows. The first steps of a run are
not measured. `--python`: the interpreter of the environment that has an engine (`make engine-NAME` makes
.venv-NAME/bin/python); native runs in this one, and engines without an interpreter are left out. `--seconds`: no round
starts that would end later. Writes OUT.json and OUT.md after each round; rounds that OUT.json has already are kept, and
count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measuring import describe_machine, spread

PROCESSES = 2
WARM_UP = 6


@dataclass(frozen=True)
class Size:
    """Width and layers of a Llama, tokens of a sequence, sequences of a global batch."""

    width: int
    layers: int
    tokens: int
    batch: int


SIZES = {"full": Size(192, 4, 128, 8), "tiny": Size(32, 2, 32, 4)}
ROWS = {
    "native, ddp": ("native", ["parallel=ddp"]),
    "native, zero2": ("native", ["parallel=zero2"]),
    "native, fsdp": ("native", ["parallel=fsdp"]),
    "deepspeed, zero2": ("deepspeed", ["parallel=zero2"]),
    "deepspeed, fsdp": ("deepspeed", ["parallel=fsdp"]),
    "horovod, ddp": ("horovod", ["parallel=ddp"]),
    "tensorflow, multi_worker": ("tensorflow", ["parallel=ddp", "tensorflow.strategy=multi_worker"]),
}
"""The engine and the overrides of each row; the first one is what ratios refer to."""


def write_work(folder, size, steps):
    """A recipe and its text."""
    (folder / "text.txt").write_text("".join(f"{number} times {number} is {number**2}.\n" for number in range(20_000)))
    config = {
        "model_type": "llama", "hidden_size": size.width, "intermediate_size": size.width * 11 // 4,
        "num_hidden_layers": size.layers, "num_attention_heads": size.width // 32, "tie_word_embeddings": False,
    }  # fmt: skip
    recipe = {
        "run": {"name": "engines"}, "model": {"config": config}, "tokenizer": "bytes",
        "data": {"train": [{"path": "text.txt"}], "sequence_len": size.tokens},
        "train": {
            "steps": steps, "global_batch_size": size.batch, "micro_batch_size": size.batch // PROCESSES,
            "precision": "fp32", "compile": False, "log_every": steps,
        },
        "optim": {"learning_rate": 1e-3}, "checkpoint": {"every": steps},
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))


def run_row(folder, name, python):
    """(tokens per second, peak memory of the largest process, losses) of one run."""
    engine, overrides = ROWS[name]
    run = f"run.name=run-{time.monotonic_ns()}"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [python, "-m", "echelon", "train", "recipe.json", "--nproc", str(PROCESSES), run, f"engine={engine}"]
    done = subprocess.run([*command, *overrides], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    lines = (folder / "runs" / run.partition("=")[2] / "metrics.jsonl").read_text().splitlines()
    rows = [each for each in map(json.loads, lines) if each["kind"] == "train"]
    measured = rows[WARM_UP:]
    tokens = rows[-1]["tokens"] - rows[WARM_UP - 1]["tokens"]
    rate = tokens / sum(each["step_seconds"] for each in measured)
    return rate, max(each["memory_peak_bytes"] for each in rows), [each["loss"] for each in rows]


def measure(result, pythons, rounds, seconds, write):
    """Add rounds to a result: rates, peaks and the largest difference of a loss from that of the first row, by row."""
    found, size, steps = result["rows"], SIZES[result["size"]], result["steps"]
    names = [name for name, (engine, _) in ROWS.items() if engine in pythons]
    for name in names:
        found.setdefault(name, {"rates": [], "peaks": [], "difference": 0.0})
    started, first = time.monotonic(), len(found[names[0]]["rates"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_work(folder, size, steps)
        for number in range(first, rounds):
            spent, done = time.monotonic() - started, number - first
            if done and spent * (done + 1) / done > seconds:
                break
            losses = {}
            for name in names if number % 2 == 0 else reversed(names):
                rate, peak, losses[name] = run_row(folder, name, pythons[ROWS[name][0]])
                found[name]["rates"].append(rate)
                found[name]["peaks"].append(peak)
                print(f"round {number + 1}: {name}: {rate:,.0f} tokens/s, {peak / 2**20:,.0f} MiB", flush=True)
            for name in names:
                pairs = zip(losses[name], losses[names[0]], strict=True)
                apart = max(abs(one - other) for one, other in pairs)
                found[name]["difference"] = max(found[name]["difference"], apart)
            write()


def find_versions(pythons):
    """The version of each engine's package, from its own environment."""
    packages = {"native": "torch", "deepspeed": "deepspeed", "horovod": "horovod", "tensorflow": "tensorflow-cpu"}
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    found = []
    for engine, python in pythons.items():
        done = subprocess.run([python, "-c", code, packages[engine]], check=True, capture_output=True, text=True)
        found.append(f"{packages[engine]} {done.stdout.strip()}")
    return found


def render_page(result):
    """The page of a result."""
    rows, size = result["rows"], SIZES[result["size"]]
    first = next(iter(rows.values()))["rates"]
    lines = [
        "# Engines side by side",
        "",
        f"`python benchmarks/engines.py`: {result['machine']}; {', '.join(result['versions'])}.",
        "",
        f"Two processes with OMP_NUM_THREADS=1 (TensorFlow chooses its threads itself), fp32: a Llama of {size.layers} "
        f"layers and width {size.width}, {size.batch} sequences of {size.tokens} tokens in a step; {len(first)} rounds "
        f"of {result['steps']} steps, of which the first {WARM_UP} are not measured. Tokens per second: the median of "
        "the rounds and their range; the ratio is that of the same round. Memory: the most a process had resident, "
        "with its libraries. Loss: the largest difference from the first row in any step.",
        "",
        "| engine, strategy | tokens/s | of native, ddp | memory, MiB | loss apart |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        ratios = [one / other for one, other in zip(row["rates"], first, strict=True)]
        cells = (name, spread(row["rates"], ",.0f"), spread(ratios, ".2f"), f"{max(row['peaks']) / 2**20:,.0f}")
        lines.append(f"| {' | '.join(cells)} | {row['difference']:.1e} |")
    return "\n".join(lines) + "\n"


def main():
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--size", choices=SIZES, default="full")
    options = parser.parse_args()
    pythons = {"native": sys.executable} | dict(each.split("=", 1) for each in options.python)
    path = options.out.with_suffix(".json")
    result = {
        "machine": describe_machine("torch"),
        "versions": find_versions(pythons),
        "steps": options.steps,
        "size": options.size,
        "rows": {},
    }
    if path.exists():
        result["rows"] = json.loads(path.read_text())["rows"]

    def write():
        path.write_text(json.dumps(result, indent=1))
        options.out.with_suffix(".md").write_text(render_page(result))

    measure(result, pythons, options.rounds, options.seconds, write)


if __name__ == "__main__":
    main()
