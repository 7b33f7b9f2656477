"""What each strategy sends and how fast it trains at 1, 2, 4 and 8 processes, over gloo on this machine.

    python benchmarks/scaling.py [--processes 1 2 4 8] [--steps 8] [--rounds 2] [--size full|tiny] [--out FILE.md]

A small Llama, for `ep` a Mixtral, with micro batches of one size, bf16, one thread each. Each pair of strategy and
number of processes trains in processes of its own, in turns over the rounds. *theory* is the planner's formula
(planner/more_devices.py), *sent* what the kernel counted for the sockets of a rank in one step. A difference above 2 %,
of `ep` above 5 %, fails the run.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines import EngineSpec
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.model.build import load_config
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.more_devices import count_step_bytes
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from measuring import describe_machine, spread
from traffic import count_sent_bytes, plan_strategies, read_sent_bytes

SIZES = {"full": (256, 8, 128, 4), "tiny": (128, 2, 128, 4)}  # width, layers, tokens, micro batch
VOCABULARY, WARMUP_STEPS, NUM_EXPERTS = 8192, 2, 8
TOLERANCE, ROUTED_TOLERANCE = 0.02, 0.05  # of experts, which the router does not choose equally often
QUOTED = {1: "1.0", 2: "1.9", 4: "3.8", 8: "7.5"}
# Workers are forked from a process that has imported what they need.
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["echelon.learn.engines.native_build", "transformers.models.llama.modeling_llama"])


def describe_model(width, layers, length, has_experts=False):
    """A Llama, or a Mixtral, whose sizes divide evenly over 8 processes."""
    experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2} if has_experts else {}
    return {
        "model_type": "mixtral" if has_experts else "llama", **experts,
        "hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 32, "vocab_size": VOCABULARY,
        "max_position_embeddings": length,
    }  # fmt: skip


def list_plans(processes, size):
    """A plan of each strategy, by name; one process has only one. A pipeline has a microbatch for each stage."""
    _, layers, length, batch = SIZES[size]
    own = {"precision": Precision(compute="bfloat16"), "sequence_len": length, "micro_batch_size": batch}
    if processes == 1:
        return {"one process": ParallelPlan("ddp", **own)}
    resharded = {**own, "reshard_after_forward": True, "reduce_gradients": "each"}
    plans = {plan.strategy: plan for plan in plan_strategies(processes, **own)}
    plans |= {
        "tp": ParallelPlan("tp", tp=processes, **resharded),
        "tp, sequence parallel": ParallelPlan("tp", tp=processes, sequence_parallel=True, **resharded),
        "cp, allgather": ParallelPlan("cp", cp=processes, cp_method="allgather", **resharded),
        "cp, ulysses": ParallelPlan("cp", cp=processes, cp_method="ulysses", **resharded),
        "ep": ParallelPlan("ep", dp_shard=processes, ep=processes, **resharded),
    }
    if processes <= layers:
        stages = (layers // processes,) * processes
        plans["pp"] = ParallelPlan(
            "pp", pp=processes, stages=stages, schedule="1f1b", num_microbatches=processes, **own
        )
    return plans


def train(rank, processes, folder, size, plan, num_steps):
    """Run one rank: train, and write what each step took and what this rank sent in it."""
    torch.set_num_threads(1)
    width, layers, length, batch = SIZES[size]
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    recipe, _ = load_recipe(Path(folder) / "recipe.yaml")
    config, device = load_config(describe_model(width, layers, length, plan.ep > 1)), torch.device("cpu")
    meshes = build_mesh(plan, "cpu")
    engine = build_native_engine(EngineSpec(recipe, config, plan, meshes, device))
    tokens = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(meshes.data_rank))
    places = np.arange(batch)
    microbatch = Microbatch(tokens, tokens, places, places).cut(meshes.sequence_part)
    microbatches = [microbatch] * plan.num_microbatches
    num_targets = torch.tensor(float(count_tokens(plan, size)))
    engine.rehearse(microbatch, plan.num_microbatches, CausalLM())
    seconds, sent = [], []
    for step in range(WARMUP_STEPS + num_steps):
        before, started = read_sent_bytes(), time.perf_counter()
        engine.forward_backward(step, microbatches, num_targets, CausalLM())
        engine.clip(1.0)
        engine.step(1e-4, torch.tensor(True))
        seconds.append(time.perf_counter() - started)
        dist.barrier()  # the others have received what this rank sent
        sent.append(count_sent_bytes(before))
    measured = {"seconds": seconds[WARMUP_STEPS:], "sent": sent[WARMUP_STEPS:]}
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def count_tokens(plan, size):
    """Those of a step, of all ranks."""
    _, _, length, batch = SIZES[size]
    return batch * length * plan.num_microbatches * plan.dp_replicate * plan.dp_shard


def measure(processes, plan, size, num_steps):
    """(tokens per second of all ranks, bytes that a rank sends in a step; in a pipeline the rank that sends most)."""
    _, _, length, batch = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "run": {"name": "scaling"}, "model": {"config": describe_model(*SIZES[size][:3])}, "tokenizer": "bytes",
            "data": {"train": "python-stdlib", "sequence_len": length},
            "train": {"steps": 1, "global_batch_size": batch * processes}, "optim": {"learning_rate": 1e-4},
        }  # fmt: skip
        (Path(folder) / "recipe.yaml").write_text(json.dumps(recipe))
        arguments = (processes, folder, size, plan, num_steps)
        started = [WARM.Process(target=train, args=(rank, *arguments), daemon=True) for rank in range(processes)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            sys.exit(f"{plan.strategy} on {processes} failed")
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    seconds = statistics.median(max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True))
    sent = [statistics.median(rank["sent"]) for rank in ranks]
    return count_tokens(plan, size) / seconds, max(sent) if plan.pp > 1 else statistics.fmean(sent)


def render(arguments, rates, sent):
    """The table, and whether every strategy sends what it should."""
    width, layers, length, batch = SIZES[arguments.size]
    shapes = [build_shape(describe_model(width, layers, length, each)) for each in (False, True)]
    lines = [
        "# Scaling over processes, on CPUs", "",
        f"`python benchmarks/scaling.py`: {describe_machine('torch', 'transformers')}. A Llama of "
        f"{shapes[0].num_parameters / 1e6:.1f} M parameters, for `ep` a Mixtral of {NUM_EXPERTS} experts and "
        f"{shapes[1].num_parameters / 1e6:.1f} M; {batch} sequences of {length} tokens in a microbatch, bf16; "
        f"{arguments.rounds} rounds of {arguments.steps} steps.", "",
        "| Processes | Strategy | Theory, MB | Sent, MB | Sent / theory | Tokens/s | Times one process | Quoted |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    base = statistics.median(next(iter(rates.values()))) / arguments.processes[0]
    is_right = True
    for (processes, strategy), own in rates.items():
        plan = list_plans(processes, arguments.size)[strategy]
        theory = sum(count_step_bytes(shapes[plan.ep > 1], plan, "cpu").values())
        measured = sent[processes, strategy]
        ratio = "" if processes == 1 else f"{measured / theory:.3f}"
        allowed = ROUTED_TOLERANCE if plan.ep > 1 else TOLERANCE
        is_right &= processes == 1 or abs(measured / theory - 1) <= allowed
        lines.append(
            f"| {processes} | {strategy} | {theory / 1e6:.2f} | "
            f"{measured / 1e6:.2f} | {ratio} | {spread(own, ',.0f')} | {statistics.median(own) / base:.2f} | "
            f"{QUOTED.get(processes, '')} |"
        )
    cores = os.cpu_count()
    lines += [
        "",
        "Bytes are those a rank sends in one step, in a pipeline the rank that sends most. The theory of `ep` assumes "
        "that all experts are chosen equally often. Under sequence parallelism gloo sends twice as much as a "
        "reduce-scatter needs, which the theory includes. tp, pp and cp divide the same microbatch over more "
        "processes; the others have one for each. *Quoted* are the speed-ups that data parallelism is usually credited "
        f"with, on one GPU per process. This machine has {cores} cores: beyond {cores} processes they share the cores, "
        "so the table cannot show a speed-up there, only what more processes cost.",
    ]
    return "\n".join(lines) + "\n", is_right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny: a test of this program")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rates, sent = {}, {}
    for number in range(arguments.rounds):
        for processes in arguments.processes:
            for name, plan in list_plans(processes, arguments.size).items():
                key = processes, name
                rate, sent[key] = measure(processes, plan, arguments.size, arguments.steps)
                rates.setdefault(key, []).append(rate)
                print(f"round {number + 1}: {name} on {processes}: {rate:,.0f} tokens/s", flush=True)
    text, is_right = render(arguments, rates, sent)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    sys.exit(0 if is_right else "a strategy sends other bytes than its formula says")


if __name__ == "__main__":
    main()
