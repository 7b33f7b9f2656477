"""What each technique for the memory of activations saves, and the time that it costs.

    python benchmarks/activations.py [TECHNIQUE ...] [--steps 7]

Each technique trains the same model in a separate process, on a GPU if there is one. The peak is that of the bytes
allocated for tensors in a step, the time the median of steps. Ratios are to the run without a technique; those of
compiled layers, to the compiled run without one. Offloading needs a GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch

from echelon.distributed.runtime import start_runtime, stop_runtime
from echelon.planner.memory import estimate_memory
from echelon.planner.shape import build_shape
from measuring import describe_machine, synchronize
from memory import Case, Recorder, build_engine, train_step

FULL, COMPILED = {"activation_checkpointing": "full"}, {"compile": True}
OFFLOADED = {"activation_offloading": True}
TECHNIQUES = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "every 2nd layer": {**FULL, "checkpoint_every": 2},
    "full": FULL,
    "none, compiled": COMPILED,
    "memory budget 0.5, compiled": {**COMPILED, "activation_memory_budget": 0.5},
    "memory budget 0, compiled": {**COMPILED, "activation_memory_budget": 0.0},
    "full, compiled": {**COMPILED, **FULL},
}
ON_GPUS = {
    **{f"offloaded, {ahead} ahead": {**OFFLOADED, "activation_loading_horizon": ahead} for ahead in (0, 1, 2)},
    "full, offloaded, compiled": {**COMPILED, **FULL, **OFFLOADED},
}


def build_case() -> Case:
    if torch.cuda.is_available():
        wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
        return Case(32000, 2048, 4, "bfloat16", config={**wide, "num_key_value_heads": 16})
    wide = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4}
    return Case(256, 512, 4, config={**wide, "num_key_value_heads": 4})


def measure(name: str, steps: int) -> dict[str, float]:
    """The peak in bytes, its prediction, and the seconds of a step, in this process."""
    runtime, case = start_runtime(), build_case()
    plan, device = replace(case.plan(), **(TECHNIQUES | ON_GPUS)[name]), runtime.device
    recorder = Recorder(device)
    with recorder:
        engine = build_engine(case, plan, device)
        for step in range(2):
            train_step(engine, case, step, device)
    seconds = []
    for step in range(2, 2 + steps):
        synchronize()
        started = time.perf_counter()
        train_step(engine, case, step, device)
        synchronize()
        seconds.append(time.perf_counter() - started)
    stop_runtime()
    planned = estimate_memory(build_shape(case.model()), plan, case.sequence_len, device.type)
    return {"peak": recorder.peak_bytes, "planned": planned.total, "seconds": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help="Default: all that this machine can run")
    parser.add_argument("--steps", type=int, default=7, help="steps whose median is the time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.techniques[0], arguments.steps)))
        return
    print(f"{describe_machine('torch', 'transformers')}\n")
    print("| technique | peak, MB | planned, MB | step, s | peak, ratio | step, ratio |\n|---|---|---|---|---|---|")
    names = arguments.techniques or [*TECHNIQUES, *(ON_GPUS if torch.cuda.is_available() else ())]
    found = {}
    for name in names:
        command = [sys.executable, __file__, "--here", name, "--steps", str(arguments.steps)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = found[name] = json.loads(done.stdout.splitlines()[-1])
        base = found.get("none, compiled" if "compiled" in name else "none", row)
        sizes = f"{row['peak'] / 1e6:.0f} | {row['planned'] / 1e6:.0f} | {row['seconds']:.3f}"
        ratios = f"{row['peak'] / base['peak']:.2f} | {row['seconds'] / base['seconds']:.2f}"
        print(f"| {name} | {sizes} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
