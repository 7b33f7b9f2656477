"""What a training step on one CPU core takes with each choice that echelon makes there, side by side.

    python benchmarks/cpu_steps.py [--rounds 3] [--steps 5] [--dtype fp32] [--out benchmarks/results/cpu-steps.md]

A Llama of 34 M parameters, 4 sequences of 512 tokens, bf16 autocast or fp32, AdamW and clipping, in a plain PyTorch
loop on one thread. Each variant runs in a process of its own, because memory is kept or returned per process, in turns
with the others. Times are CPU seconds of the thread, which other work on the machine disturbs little.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
VOCABULARY, LENGTH, BATCH = 8192, 512, 4
# Name: attention implementation, compiled layers, freed memory kept.
VARIANTS = {
    "torch's attention": ("sdpa", False, False),
    "torch's attention, compiled": ("sdpa", True, False),
    "torch's attention, memory kept": ("sdpa", False, True),
    "torch's attention, compiled, memory kept": ("sdpa", True, True),
    "eager attention, compiled": ("eager", True, False),
    "eager attention, compiled, memory kept": ("eager", True, True),
    "in blocks, memory kept": ("blocks", False, True),
    "in blocks, compiled, memory kept": ("blocks", True, True),
}


def measure(attention: str, compiles: bool, keeps: bool, num_steps: int, dtype: str) -> dict[str, float]:
    """Train in this process: the seconds of a step, of the first step, and the largest resident memory in bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from echelon.learn.model.attention import PLAIN_CAUSAL
    from echelon.planner.hardware.heap import keep_freed_memory

    if keeps:
        keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.set_attn_implementation(PLAIN_CAUSAL if attention == "blocks" else attention)
    if compiles:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    seconds = []
    for _ in range(num_steps + 2):
        started = time.thread_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.thread_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step": statistics.median(seconds[2:]), "first": seconds[0], "peak": peak, "loss": loss.item()}


def render(rows: dict[str, list[dict[str, float]]], dtype: str) -> str:
    """The measurements as Markdown, relative to the second variant, the default of other trainers."""
    machine = f"one core of {os.cpu_count()} ({platform.machine()}), Python {platform.python_version()}"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    load = os.getloadavg()[0]
    lines = [
        "# A training step on a CPU",
        "",
        f"`python benchmarks/cpu_steps.py --dtype {dtype}`, {time.strftime('%Y-%m-%d')}: {machine}, {versions}, "
        f"load {load:.1f}.",
        "Median over the rounds of the median CPU seconds of a step, with the smallest and largest round; the tokens "
        "per second of that median; the ratio of the seconds to those of torch's attention, compiled; the peak memory.",
        "",
        "| Variant | Seconds | Smallest to largest | Tokens/s | Times as fast | Peak GiB | Loss at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    base = statistics.median(each["step"] for each in rows["torch's attention, compiled"])
    for name, found in rows.items():
        steps = [each["step"] for each in found]
        middle = statistics.median(steps)
        lines.append(
            f"| {name} | {middle:.3f} | {min(steps):.3f} to {max(steps):.3f} | {BATCH * LENGTH / middle:,.0f} | "
            f"{base / middle:.2f} | {max(each['peak'] for each in found) / 2**30:.2f} | {found[0]['loss']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure one variant in this process, or all of them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(*VARIANTS[options.variant], options.steps, options.dtype)))
        return
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for number in range(options.rounds):
        for name in VARIANTS:
            given = ["--steps", str(options.steps), "--dtype", options.dtype]
            command = [sys.executable, __file__, "--variant", name, *given]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows[name].append(json.loads(out.splitlines()[-1]))
            print(f"round {number + 1}: {name}: {rows[name][-1]['step']:.3f} s", flush=True)
    text = render(rows, options.dtype)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
