"""The time of an optimizer step, compiled and not, beside the memory that it must read and write.

    python benchmarks/optimizer_steps.py [--layers 2] [--rounds 5] [--steps 5] [--out FILE]

The parameters of decoder layers of Llama with a hidden size of 2048, on one thread of a CPU or on a GPU. Compiled and
not compiled steps run in alternating rounds. "Passes" is what the machine could copy in the time of a step, divided by
the bytes of weight, gradient and state that a step reads and writes once: 1 is the best possible.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from echelon.learn.optimizer.slot import Slot
from echelon.learn.optimizer.stepper import CompiledUpdate, Optimizer, ParameterGroup, choose_rule, compile_rule
from echelon.recipe.training import OptimConfig
from measuring import describe_machine, measure_copy, spread, synchronize

LAYER = {"attention": ((2048, 2048), 4), "wide": ((5632, 2048), 2), "narrow": ((2048, 5632), 1), "norms": ((2048,), 2)}
CASES = [
    ("adamw", "fp32"),
    ("adamw", "bf16_kahan"),
    ("adamw", "bf16_stochastic"),
    ("adamw_8bit", "fp32"),
    ("adamw_8bit", "bf16_kahan"),
    ("lion", "fp32"),
    ("lion", "bf16_kahan"),
    ("adafactor", "fp32"),
]
COMMIT = torch.tensor(True)


def build(name: str, master_weights: str, num_layers: int, compiles: bool) -> Optimizer:
    """An optimizer of layers with random weights and gradients."""
    config = OptimConfig(name=name, learning_rate=1.0)
    rule = choose_rule(config, is_layer_matrix=True)
    if compiles:
        rule = compile_rule(rule, "inductor")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if master_weights == "fp32" else torch.bfloat16
    slots = []
    for shape in [shape for shape, count in LAYER.values() for _ in range(count * num_layers)]:
        parameter = nn.Parameter(torch.randn(shape, device=device).to(dtype))
        parameter.grad = torch.randn(shape, device=device).to(dtype)
        slots.append(Slot(str(len(slots)), parameter, rule, name == "adamw_8bit", master_weights == "bf16_kahan"))
    return Optimizer([ParameterGroup(rule, 0.1, 1.0, slots)], 0, CompiledUpdate("inductor") if compiles else None)


def count_bytes(optimizer: Optimizer) -> int:
    """What a step reads and writes if it does so once: gradients are only read."""
    kept = sum(tensor.nbytes for _, tensor in optimizer.tensors())
    weights = sum(slot.parameter.nbytes for group in optimizer.groups for slot in group.slots)
    return 2 * (kept + weights) + weights


def time_step(optimizer: Optimizer, step: int, commit: torch.Tensor) -> float:
    """Seconds."""
    synchronize()
    started = time.perf_counter()
    optimizer.step(step, 1e-4, commit)
    synchronize()
    return time.perf_counter() - started


def measure(name: str, master_weights: str, options: argparse.Namespace, bytes_per_second: float) -> str:
    """The row of the table of one optimizer."""
    sides = [build(name, master_weights, options.layers, compiles) for compiles in (False, True)]
    commit = COMMIT.to(sides[0].groups[0].slots[0].parameter.device)
    first = [time_step(side, 0, commit) for side in sides]
    seconds: list[list[float]] = [[], []]
    for number in range(options.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            times = [time_step(sides[which], 1 + step, commit) for step in range(options.steps)]
            seconds[which].append(statistics.median(times))
    eager, compiled = map(statistics.median, seconds)
    best = count_bytes(sides[0]) / bytes_per_second
    cells = [
        name, master_weights, spread([1e3 * each for each in seconds[0]], ".1f"),
        spread([1e3 * each for each in seconds[1]], ".1f"), f"{eager / compiled:.2f}", f"{eager / best:.1f}",
        f"{compiled / best:.1f}", f"{first[1] - compiled:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure each optimizer and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bytes_per_second = measure_copy()
    numbers = options.layers * sum(torch.Size(shape).numel() * count for shape, count in LAYER.values())
    lines = [
        "# Optimizer steps",
        "",
        f"`python benchmarks/optimizer_steps.py --layers {options.layers} --rounds {options.rounds} --steps "
        f"{options.steps}`, {describe_machine('torch')}, one thread: {numbers / 1e6:.0f} M parameters, a copy runs at "
        f"{bytes_per_second / 1e9:.1f} GB/s. Medians over the rounds, and their range.",
        "",
        "| Optimizer | Master weights | ms | ms, compiled | Times as fast | Passes | Passes, compiled | Compiling, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, master_weights in CASES:
        lines.append(measure(name, master_weights, options, bytes_per_second))
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
