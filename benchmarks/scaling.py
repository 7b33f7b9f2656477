"""What each strategy sends and how fast it trains at 1, 2, 4 and 8 processes, over gloo on this machine.

    python benchmarks/scaling.py [--processes 1 2 4 8] [--steps 8] [--rounds 3] [--size full|tiny] [--out FILE.md]

A small Llama, the same micro batch on every process, bf16, one thread each. Each pair of strategy and number of
processes trains in processes of its own, in turns over the rounds. *theory* is the formula of docs/strategies.md,
*sent* what the kernel counted for the sockets of a rank in one step. A difference above 2 % fails the run.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from echelon.data.loader import Microbatch
from echelon.distributed.mesh import build_mesh
from echelon.engines.native import build_native_engine
from echelon.model.build import load_config
from echelon.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.shape import build_shape
from echelon.recipe import load_recipe
from measuring import describe_machine, spread
from traffic import count_sent_bytes, expect_traffic, plan_strategies, read_sent_bytes

SIZES = {"full": (256, 4, 128, 4), "tiny": (64, 2, 16, 1)}  # width, layers, tokens, micro batch
VOCABULARY, WARMUP_STEPS, TOLERANCE = 8192, 2, 0.02
QUOTED = {1: "1.0", 2: "1.9", 4: "3.8", 8: "7.5"}


def describe_model(width, layers, length):
    """A Llama whose sizes divide evenly over 8 processes."""
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 32, "vocab_size": VOCABULARY,
        "max_position_embeddings": length,
    }  # fmt: skip


def list_plans(processes):
    """A plan of each strategy; one process has only one."""
    precision = Precision(compute="bfloat16")
    if processes == 1:
        return [ParallelPlan("ddp", precision=precision)]
    return plan_strategies(processes, precision=precision)


def train(rank, processes, folder, size, plan, num_steps):
    """Run one rank: train, and write what each step took and what this rank sent in it."""
    torch.set_num_threads(1)
    width, layers, length, batch = SIZES[size]
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    recipe, _ = load_recipe(Path(folder) / "recipe.yaml")
    config, device = load_config(describe_model(width, layers, length)), torch.device("cpu")
    engine = build_native_engine(recipe, config, plan, build_mesh(plan, "cpu"), CausalLM(), device)
    tokens = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(rank))
    places = np.zeros(batch, dtype=np.int64)
    microbatch, num_targets = (
        Microbatch(tokens, tokens, places, places),
        torch.tensor(float(tokens.numel() * processes)),
    )
    engine.rehearse(microbatch, 1)
    seconds, sent = [], []
    for step in range(WARMUP_STEPS + num_steps):
        before, started = read_sent_bytes(), time.perf_counter()
        engine.forward_backward(step, [microbatch], num_targets)
        engine.clip(1.0)
        engine.step(1e-4, torch.tensor(True))
        seconds.append(time.perf_counter() - started)
        dist.barrier()  # the others have received what this rank sent
        sent.append(count_sent_bytes(before))
    measured = {"seconds": seconds[WARMUP_STEPS:], "sent": sent[WARMUP_STEPS:]}
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def measure(processes, plan, size, num_steps):
    """(tokens per second of all ranks, bytes that the rank that sends most sends in a step)."""
    _, _, length, batch = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "run": {"name": "scaling"}, "model": {"config": describe_model(*SIZES[size][:3])}, "tokenizer": "bytes",
            "data": {"train": "python-stdlib", "sequence_len": length},
            "train": {"steps": 1, "global_batch_size": batch * processes}, "optim": {"learning_rate": 1e-4},
        }  # fmt: skip
        (Path(folder) / "recipe.yaml").write_text(json.dumps(recipe))
        multiprocessing.spawn(train, (processes, folder, size, plan, num_steps), nprocs=processes)
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    seconds = statistics.median(max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True))
    return batch * length * processes / seconds, max(statistics.median(rank["sent"]) for rank in ranks)


def render(arguments, rates, sent):
    """The table, and whether every strategy sends what it should."""
    width, layers, length, batch = SIZES[arguments.size]
    shape = build_shape(describe_model(width, layers, length))
    lines = [
        "# Scaling over processes, on CPUs", "",
        f"`python benchmarks/scaling.py`: {describe_machine('torch', 'transformers')}. A Llama of "
        f"{shape.num_parameters / 1e6:.1f} M parameters, {batch} sequences of {length} tokens a process, bf16, "
        f"{arguments.rounds} rounds of {arguments.steps} steps.", "",
        "| Processes | Strategy | Theory, MB | Sent, MB | Sent / theory | Tokens/s | Times one process | Quoted |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    base = statistics.median(next(iter(rates.values()))) / arguments.processes[0]
    is_right = True
    for (processes, strategy), own in rates.items():
        plan = next(each for each in list_plans(processes) if each.strategy == strategy)
        theory, measured = expect_traffic(plan, shape).sent_bytes(plan), sent[processes, strategy]
        ratio = "" if processes == 1 else f"{measured / theory:.3f}"
        is_right &= processes == 1 or abs(measured / theory - 1) <= TOLERANCE
        lines.append(
            f"| {processes} | {strategy if processes > 1 else 'one process'} | {theory / 1e6:.2f} | "
            f"{measured / 1e6:.2f} | {ratio} | {spread(own, ',.0f')} | {statistics.median(own) / base:.2f} | "
            f"{QUOTED.get(processes, '')} |"
        )
    cores = os.cpu_count()
    lines += [
        "",
        f"Bytes are those a rank sends in one step. *Quoted* are the speed-ups that data parallelism is usually "
        f"credited with, on one GPU per process. This machine has {cores} cores: beyond {cores} processes they share "
        "the cores, so the table cannot show a speed-up there, only what more processes cost.",
    ]
    return "\n".join(lines) + "\n", is_right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny: a test of this program")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rates, sent = {}, {}
    for number in range(arguments.rounds):
        for processes in arguments.processes:
            for plan in list_plans(processes):
                key = processes, plan.strategy
                rate, sent[key] = measure(processes, plan, arguments.size, arguments.steps)
                rates.setdefault(key, []).append(rate)
                print(f"round {number + 1}: {plan.strategy} on {processes}: {rate:,.0f} tokens/s", flush=True)
    text, is_right = render(arguments, rates, sent)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    sys.exit(0 if is_right else f"a strategy sends more than {TOLERANCE:.0%} off its formula")


if __name__ == "__main__":
    main()
