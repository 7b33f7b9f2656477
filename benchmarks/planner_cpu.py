"""Tokens per second that the plan of a calibrated CPU predicts, beside those of real runs of the same recipes.

    python benchmarks/planner_cpu.py OUT [--rounds 2] [--steps 14]

Each round trains every row in turn through the command line: each prediction is that of the run's own estimate.json.
Before the rows of one model on so many processes this machine is calibrated (`echelon plan --calibrate`), since the
speed of a shared one drifts within minutes. What is predicted and what is measured are compared within a round. Runs do
not correct later ones. Keeps whole rounds in OUT.json, so that more can be added, and writes OUT.md.
"""

import argparse
import itertools
import json
import os
import pydoc_data.topics
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import describe_machine

# Width, inner width, layers, heads, tokens of a sequence, sequences of a step.
SIZES = {"narrow": (128, 352, 4, 4, 256, 16), "wide": (384, 1024, 8, 8, 256, 8)}
MORE_STEPS = {"narrow": 3, "wide": 1}  # the steps of the narrow model are shorter
PLANS = {
    "ddp": "ddp",
    "zero2": "zero2",
    "fsdp": "fsdp",
    "tp": "{{tp: {n}}}",
    "pp": "{{pp: {n}}}",
}
PROCESSES = (2, 4)
WANTED, DIFFERENT = 0.15, 0.10


def write_recipe(folder, size):
    width, inner, layers, heads, tokens, batch = SIZES[size]
    recipe = {
        "run": {"name": size},
        "model": {
            "config": {
                "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
                "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": tokens,
            },
        },
        "tokenizer": "bytes",
        "data": {"train": pydoc_data.topics.__file__, "sequence_len": tokens},
        "train": {
            "global_batch_size": batch, "precision": "fp32", "compile": False, "eval_every": None, "log_every": 100,
            "activation_checkpointing": "none",
        },
        "optim": {"learning_rate": 1e-3},
        "checkpoint": {"every": 100000},
    }  # fmt: skip
    path = folder / f"{size}.json"
    path.write_text(json.dumps(recipe))
    return path


def run_command(folder, *arguments):
    """Run echelon in a folder whose cache has the calibration alone, so that no run corrects the plan of another."""
    shutil.rmtree(folder / "cache" / "measured-runs", ignore_errors=True)
    environment = {**os.environ, "ECHELON_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "echelon", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def measure(folder, recipe, name, processes, steps):
    """(predicted, measured) tokens per second of a run."""
    parallel = PLANS[name].format(n=processes)
    options = [f"parallel={parallel}", f"train.steps={MORE_STEPS[recipe.stem] * steps}"]
    run_command(folder, "train", recipe.name, "--nproc", str(processes), "--fresh", *options)
    found = json.loads((folder / "runs" / recipe.stem / "estimate.json").read_text())["reckoning"]
    return tuple(found[side]["tokens_per_second"] for side in ("predicted", "measured"))


def describe(results, machine, calibrating):
    """The lines of the page.

    Args:
        results: (predicted, measured) tokens per second of each round, by (size, processes, plan).
        calibrating: seconds of each calibration.
    """
    yield "# The plan of a calibrated CPU beside real runs\n"
    yield machine + "\n"
    yield (
        f"`echelon plan --calibrate` took {statistics.median(calibrating):.0f} s. Predicted and measured are tokens "
        "per second, medians over the rounds; measured is the median of a run's steps. The ratio is the median over "
        "the rounds of predicted / measured, each with the calibration before it.\n"
    )
    yield "| model | processes | plan | predicted | measured | ratio | of every round |"
    yield "|---|---|---|---|---|---|---|"
    found = []
    for (size, processes, name), rounds in results.items():
        predicted, measured = (statistics.median(each[side] for each in rounds) for side in (0, 1))
        ratios = [one / other for one, other in rounds]
        found.append(statistics.median(ratios))
        every = " ".join(f"{each:.2f}" for each in ratios)
        yield f"| {size} | {processes} | {name} | {predicted:,.0f} | {measured:,.0f} | {found[-1]:.2f} | {every} |"
    within = sum(abs(each - 1) <= WANTED for each in found)
    error = statistics.median(abs(each - 1) for each in found)
    yield f"\n{within} of {len(found)} within {WANTED:.0%}; the median error is {error:.1%}.\n"
    right, wrong = 0, []
    for one, other in itertools.combinations(results, 2):
        if one[0] != other[0]:
            continue
        planned, real = (
            statistics.median(
                mine[side] / theirs[side] for mine, theirs in zip(results[one], results[other], strict=True)
            )
            for side in (0, 1)
        )
        if max(real, 1 / real) > 1 + DIFFERENT:
            if (real > 1) == (planned > 1):
                right += 1
            else:
                wrong.append(f"{one} and {other}: {real:.2f}, predicted {planned:.2f}")
    pairs = right + len(wrong)
    yield f"Of {pairs} pairs of one model that differ by more than {DIFFERENT:.0%}, {right} are ranked right."
    yield from (f"- wrong: {each}" for each in wrong)


def measure_round(folder, recipes, rows, steps):
    """The (predicted, measured) tokens per second of every row, and the seconds of each calibration."""
    found, calibrating, known = [], [], None
    for size, processes, name in rows:
        if known != (size, processes):
            began, known = time.monotonic(), (size, processes)
            run_command(folder, "plan", "--calibrate")
            calibrating.append(time.monotonic() - began)
        predicted, measured = measure(folder, recipes[size], name, processes, steps)
        found.append([size, processes, name, predicted, measured])
        print(
            f"{size}, {processes} processes, {name}: predicted {predicted:,.0f}, measured {measured:,.0f}", flush=True
        )
    return {"rows": found, "calibrating": calibrating}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2, help="with those that OUT.json has already")
    parser.add_argument("--steps", type=int, default=14, help="of the wide model")
    parser.add_argument("--size", choices=SIZES, action="append")
    arguments = parser.parse_args()
    machine, stored = describe_machine("torch", "transformers"), arguments.out.with_suffix(".json")
    rounds = json.loads(stored.read_text()) if stored.exists() else []
    rows = list(itertools.product(arguments.size or SIZES, PROCESSES, PLANS))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipes = {size: write_recipe(folder, size) for size in SIZES}
        while len(rounds) < arguments.rounds:
            order = rows[:: 1 if len(rounds) % 2 == 0 else -1]
            rounds.append(measure_round(folder, recipes, order, arguments.steps))
            stored.write_text(json.dumps(rounds, indent=1))
    results = {row: [] for row in rows}
    for size, processes, name, predicted, measured in itertools.chain.from_iterable(each["rows"] for each in rounds):
        results[size, processes, name].append((predicted, measured))
    lines = list(describe(results, machine, [seconds for each in rounds for seconds in each["calibrating"]]))
    arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
