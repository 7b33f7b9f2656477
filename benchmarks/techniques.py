"""What each way to save memory or to divide a model saves, and the time that it costs, measured side by side.

    python benchmarks/techniques.py [GROUP ...] [--rounds 3] [--steps 1] [--out PREFIX] [--seconds N] [--size full|tiny]

The rows of a group train the same global batch and start together; then each trains a block of steps in turn while the
others wait, so that a drift of the machine's speed affects all of them. On a GPU if there is one: a group needs a GPU
for each of its processes. `--out`: writes PREFIX.json and PREFIX.md; groups that PREFIX.json has already are kept.
"""

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.distributed.runtime import stop_runtime
from echelon.learn.engines import EngineSpec
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.model.build import load_config
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import ACCELERATORS, Cluster
from echelon.planner.memory import estimate_memory
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.run.lifecycle.process_group import start_runtime
from measuring import NotHere, describe_machine, measure_rows, spread, synchronize
from turns import Gate, Side, take_turns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Size:
    """A model and its batch: width, layers, heads, vocabulary, tokens of a sequence, sequences."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    micro_batch: int = 1
    batch: int = 4


SIZES = {
    ("full", "cpu"): Size(192, 8, 6, 2048, 512),
    ("full", "cuda"): Size(1024, 16, 16, 32000, 2048, micro_batch=4, batch=16),
    ("tiny", "cpu"): Size(32, 4, 4, 8192, 32),  # tables that outweigh the few MB of the engine's own objects
    ("tiny", "cuda"): Size(32, 4, 4, 8192, 32),
}


@dataclass(frozen=True)
class Group:
    """Rows that are compared: the keys of a recipe, `train` and `parallel`. The first one is what ratios refer to.

    all: keys of every row. has_experts: the model is a mixture of 8 experts, of which a token uses 2. sizes: by
    device, instead of the usual ones.
    """

    title: str
    rows: dict[str, dict]
    processes: int = 1
    all: dict = field(default_factory=dict)
    has_experts: bool = False
    needs_gpu: bool = False
    sizes: dict[str, Size] = field(default_factory=dict)

    def find_size(self, name):
        """The size `full` or `tiny` on this machine's device."""
        usual = SIZES[name, DEVICE]
        return self.sizes.get(DEVICE, usual) if name == "full" else usual


FULL, OFFLOADED = {"activation_checkpointing": "full"}, {"activation_offloading": True}
TILED = {"activation_checkpointing": {"mlp_tiles": 16}}
DATA_PARALLEL = {"ddp": {"parallel": "ddp"}, "fsdp": {"parallel": "fsdp"}}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
GROUPS = {
    "checkpointing": Group(
        "Activation checkpointing, one process",
        {
            "none": {},
            "selective, by operator": {"train": {"activation_checkpointing": "selective"}},
            "every 2nd layer": {"train": {"activation_checkpointing": {"every": 2}}},
            "full": {"train": FULL},
        },
    ),
    "compiled": Group(
        "Activation checkpointing of compiled layers, one process",
        {
            "none": {},
            "memory budget 0.5": {"train": {"activation_checkpointing": {"memory_budget": 0.5}}},
            "memory budget 0": {"train": {"activation_checkpointing": {"memory_budget": 0.0}}},
            "full": {"train": FULL},
        },
        all={"compile": True},
    ),
    "offloading": Group(
        "Activation offloading to host memory, one process",
        {
            "none": {},
            **{f"offloaded, {ahead} layers ahead": {"train": {"activation_offloading": ahead}} for ahead in (1, 2)},
            "full checkpointing": {"train": FULL},
            "full checkpointing, offloaded": {"train": {**FULL, **OFFLOADED}},
        },
        needs_gpu=True,
    ),
    "tensors": Group(
        "Divided tensors, two processes",
        {
            **DATA_PARALLEL,
            "tp 2": {"parallel": {"tp": 2}},
            "tp 2, sequence parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
        },
        processes=2,
    ),
    "sequences": Group(
        "Divided sequences, two processes",
        {
            "ddp": {"parallel": "ddp"},
            "cp 2, allgather": {"parallel": {"cp": 2, "cp_method": "allgather"}},
            "cp 2, ulysses": {"parallel": {"cp": 2, "cp_method": "ulysses"}},
            "cp 2, ring": {"parallel": {"cp": 2, "cp_method": "ring"}},
        },
        processes=2,
    ),
    "long": Group(
        "A sequence of 65,536 tokens, two processes",
        {f"cp 2, {each}": {"parallel": {"cp": 2, "cp_method": each}} for each in ("allgather", "ulysses", "ring")},
        processes=2,
        all=FULL,
        sizes={"cpu": Size(64, 1, 2, 512, 65536, batch=1), "cuda": Size(1024, 8, 16, 32000, 65536, batch=1)},
    ),
    "tiles": Group(
        "The MLP in tiles of a sequence of 65,536 tokens, two processes",
        {name: {"parallel": {"cp": 2, "cp_method": "ring"}, "train": kept}
         for name, kept in (("cp 2, ring", FULL), ("cp 2, ring, MLP in 16 tiles", TILED))},
        processes=2,
        sizes={"cpu": Size(64, 1, 2, 512, 65536, batch=1), "cuda": Size(1024, 8, 16, 32000, 65536, batch=1)},
    ),
    "pipeline": Group(
        "Pipelines, two processes",
        {"ddp": {"parallel": "ddp"},
         **{f"pp 2, {each}": {"parallel": {"pp": 2, "schedule": each}} for each in SCHEDULES}},
        processes=2,
    ),
    "experts": Group(
        "Divided experts, two processes",
        {**DATA_PARALLEL, "dp_shard 2, ep 2": {"parallel": {"dp_shard": 2, "ep": 2}}},
        processes=2,
        has_experts=True,
    ),
    "products": Group(
        "Products, four processes",
        {**DATA_PARALLEL, "tp 2 x pp 2": {"parallel": {"tp": 2, "pp": 2}},
         "tp 2 x dp_shard 2": {"parallel": {"tp": 2, "dp_shard": 2}}},
        processes=4,
    ),
}  # fmt: skip


def describe_model(size, has_experts):
    """The config of a Llama, or of a Mixtral whose experts together have the width of four MLPs."""
    width = size.width * 11 // 4
    own = {"model_type": "llama", "intermediate_size": width}
    if has_experts:
        own = {"model_type": "mixtral", "intermediate_size": width // 2, "num_local_experts": 8,
               "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}  # fmt: skip
    return {
        **own, "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads, "vocab_size": size.vocabulary, "max_position_embeddings": size.tokens,
    }  # fmt: skip


def plan_row(group, name, size, device=DEVICE):
    """(recipe, plan, estimated memory) of a row, as `echelon train` would make them."""
    keys, model = group.rows[name], describe_model(size, group.has_experts)
    train = {
        "steps": 1, "global_batch_size": size.batch, "micro_batch_size": size.micro_batch, "compile": False,
        "precision": "bf16" if device == "cuda" else "fp32",
    }  # fmt: skip
    recipe = Recipe.model_validate(
        {
            "run": {"name": "techniques"}, "model": {"config": model}, "tokenizer": "bytes",
            "data": {"train": [{"path": "x"}], "sequence_len": size.tokens},
            "train": {**train, **group.all, **keys.get("train", {})}, "optim": {"learning_rate": 1e-3},
            "parallel": keys.get("parallel", "ddp"),
        }
    )  # fmt: skip
    accelerator = ACCELERATORS["cpu" if device == "cpu" else "H100"]
    cluster = Cluster(accelerator, group.processes, group.processes, device, bf16_supported=True)
    shape = build_shape(model)
    plan = resolve_plan(recipe, shape, cluster)
    return recipe, plan, estimate_memory(shape, plan, device)


class PeakMemory:
    """The most bytes that were allocated in its block, beyond those that were when it was made.

    On a GPU from torch's allocator. On a CPU a thread asks the C library every half millisecond, because torch's
    profiler does not see what the threads of gloo free: mallinfo(3), all arenas and mapped blocks.
    """

    class _Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                         "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip

    def __init__(self, device):
        self.bytes = 0
        self._device, self._ended = device, threading.Event()
        self._library = ctypes.CDLL(None)
        self._library.mallinfo2.restype = self._Info
        self._base = self._read()

    def _read(self):
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        info = self._library.mallinfo2()
        return info.uordblks + info.hblkhd

    def _watch(self):
        while not self._ended.wait(0.0005):
            self.bytes = max(self.bytes, self._read() - self._base)

    def __enter__(self):
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._base = 0
        else:
            self._thread = threading.Thread(target=self._watch)
            self._thread.start()

    def __exit__(self, *error):
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            self.bytes = self._read()
        else:
            self._ended.set()
            self._thread.join()


class Training:
    """The training of a row in this rank: it builds the engine, and runs steps of random tokens."""

    def __init__(self, group, name, size, device):
        recipe, self.plan, _ = plan_row(group, name, size, device.type)
        self._size, self._device = size, device
        self._meshes = build_mesh(self.plan, device.type)
        config = load_config(describe_model(size, group.has_experts))
        self._engine = build_native_engine(EngineSpec(recipe, config, self.plan, self._meshes, device))
        self._step = 0
        self._engine.rehearse(self._draw()[0], self.plan.num_microbatches, CausalLM())

    def run(self, steps):
        """Train for a block of steps."""
        num_targets = torch.tensor(float(self._size.batch * self._size.tokens), device=self._device)
        for _ in range(steps):
            self._engine.forward_backward(self._step, self._draw(), num_targets, CausalLM())
            self._engine.clip(1.0)
            self._engine.step(1e-3, torch.ones((), dtype=torch.bool, device=self._device))
            self._step += 1

    def _draw(self):
        """The microbatches of a step: this rank's part of random tokens, the same on the ranks that share them."""
        numbers = np.arange(self.plan.micro_batch_size)
        generator = torch.Generator().manual_seed(self._step * self._meshes.data_size + self._meshes.data_rank)
        microbatches = []
        for _ in range(self.plan.num_microbatches):
            tokens = torch.randint(self._size.vocabulary, (len(numbers), self._size.tokens), generator=generator).to(
                self._device
            )
            microbatches.append(Microbatch(tokens, tokens, numbers, numbers).cut(self._meshes.sequence_part))
        return microbatches


def run_rank(place, group, name, size, steps):
    """One rank of a row: builds and trains, then runs blocks for as long as rank 0 is asked for them."""
    os.environ |= place
    gate = Gate() if place["RANK"] == "0" else None
    runtime = start_runtime()
    if runtime.device.type == "cpu":
        torch.set_num_threads(1)  # the same for every number of processes
    waiting = dist.new_group(backend="gloo", timeout=timedelta(hours=1))  # a GPU that waits in NCCL would be busy
    training = None
    while _hear(gate, waiting):
        if training is None:
            memory = PeakMemory(runtime.device)
            training = Training(group, name, size, runtime.device)
            training.run(1)
            with memory:
                training.run(1)
            peaks = [None] * runtime.world_size
            dist.all_gather_object(peaks, memory.bytes, waiting)
            answer = {"peaks": peaks}
        else:
            if runtime.device.type == "cuda":
                training.run(1)  # the allocator has returned its cache: turns.Gate
            synchronize()
            dist.barrier(waiting)
            started = time.perf_counter()
            training.run(steps)
            synchronize()
            dist.barrier(waiting)
            answer = {"seconds": (time.perf_counter() - started) / steps}
        if gate is not None:
            gate.tell(**answer)
    stop_runtime()


def _hear(gate, group):
    """Whether another block should run. Collective: rank 0 is told, and tells the others."""
    told = torch.tensor(gate is not None and gate.wait())
    dist.broadcast(told, 0, group)
    return bool(told)


def run_side(group_name, name, size_name, steps):
    """All ranks of a row, of which this process becomes rank 0."""
    group = GROUPS[group_name]
    size = group.find_size(size_name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = str(group.processes)
    place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(group.processes)]
    # A fork has done the imports, but a process that has asked for GPUs cannot be forked.
    context = multiprocessing.get_context("fork" if DEVICE == "cpu" else "spawn")
    others = [
        context.Process(target=run_rank, args=(each, group, name, size, steps), daemon=True) for each in places[1:]
    ]
    for each in others:
        each.start()
    run_rank(places[0], group, name, size, steps)
    for each in others:
        each.join(60)


def measure_group(name, arguments, scratch):
    """Measure the rows of a group in turns: {"machine", "rounds", "steps", "rows": {name: measured}}."""
    group = GROUPS[name]
    size = group.find_size(arguments.size)
    if group.needs_gpu and DEVICE == "cpu":
        raise NotHere("it needs a GPU: on a CPU everything is in host memory already")
    if DEVICE == "cuda" and torch.cuda.device_count() < group.processes:
        raise NotHere(f"it needs {group.processes} GPUs, and {torch.cuda.device_count()} are here")
    planned = {row: plan_row(group, row, size)[2].total for row in group.rows}
    machine = describe_machine("torch", "transformers")
    options = ["--size", arguments.size, "--steps", arguments.steps]
    sides = [
        Side(row, [__file__, "--side", name, row, *options], scratch / f"{name}-{number}.log")
        for number, row in enumerate(group.rows)
    ]
    blocks = take_turns(sides, arguments.rounds)
    rows = {
        side.name: {
            "planned": planned[side.name],
            "peaks": first["peaks"],
            "seconds": [block["seconds"] for block in rest],
        }
        for side, (first, *rest) in zip(sides, blocks, strict=True)
    }
    return {
        "machine": machine,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "size": asdict(size),
        "rows": rows,
    }


HEAD = "| technique | peak, MB | planned, MB | peak, ratio | step, s | step, ratio |\n|---|---|---|---|---|---|"


def render_group(name, measured):
    """The table of a group."""
    rows = measured["rows"]
    base = next(iter(rows.values()))
    run = f"{measured['machine']}; {measured['rounds']} rounds of {measured['steps']} step(s)."
    if GROUPS[name].sizes:
        size = Size(**measured["size"])
        run = f"A Llama {size.width} wide, with {size.layers} layer(s); {size.batch} sequence(s) in a step. {run}"
    lines = [f"## {GROUPS[name].title}", "", run, "", *HEAD.splitlines()]
    for row, own in rows.items():
        ratios = [mine / theirs for mine, theirs in zip(own["seconds"], base["seconds"], strict=True)]
        ratio = "1.00" if own is base else spread(ratios, ".2f")
        peak = max(own["peaks"])
        lines.append(
            f"| {row} | {peak / 1e6:.0f} | {own['planned'] / 1e6:.0f} | {peak / max(base['peaks']):.2f} | "
            f"{statistics.median(own['seconds']):.3f} | {ratio} |"
        )
    return "\n".join(lines)


def describe_size(size):
    """The model and the batch in words."""
    shapes = [build_shape(describe_model(size, has_experts)) for has_experts in (False, True)]
    numbers = [shape.num_parameters / 1e6 for shape in shapes]
    return (
        f"A Llama of {numbers[0]:.1f} M parameters, {size.width} wide with {size.layers} layers; in the group of "
        f"experts a Mixtral of {numbers[1]:.1f} M with 8 experts, of which a token uses 2. AdamW, a global batch of "
        f"{size.batch} sequences of {size.tokens:,} tokens in every row, micro batch {size.micro_batch}, "
        f"{'bf16' if DEVICE == 'cuda' else 'fp32, one thread in each process'}."
    )


NOTES = """\
*Peak* is the most memory that a rank had allocated at once in its second step, beyond what it had before it built its
part of the model; of the rank that had the most. *Planned* is what `echelon plan` says for the same recipe. Ratios
refer to the first row of a group. *Step, ratio* is the median of the rounds, and the range: a row's block of steps
divided by the first row's block of the same round. Differences within the range are none. The load is that of the
machine before a group was started.
"""


def render_page(found, size):
    """The page of all groups that were measured."""
    place = "a GPU" if DEVICE == "cuda" else "a CPU"
    lines = [
        f"# What each technique saves and costs on {place}",
        "",
        "`python benchmarks/techniques.py`",
        "",
        describe_size(size),
        "",
        NOTES,
    ]
    for name in GROUPS:
        if name in found:
            lines += [render_group(name, found[name]), ""]
    return "\n".join(lines)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of: {', '.join(GROUPS)}. Default: all of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="steps of a row in a round")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no group that would end later than this")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test of this program")
    parser.add_argument("--side", nargs=2, metavar=("GROUP", "ROW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.groups if name not in GROUPS]:
        parser.error(f"{', '.join(unknown)}: the groups are {', '.join(GROUPS)}")
    return arguments


def main():
    arguments = parse_arguments()
    if arguments.side is not None:
        run_side(*arguments.side, arguments.size, arguments.steps)
        return
    size = SIZES[arguments.size, DEVICE]
    results = arguments.out and arguments.out.with_name(f"{arguments.out.name}.json")
    found = json.loads(results.read_text()) if results and results.exists() else {}

    def measure(name):
        found[name] = measure_group(name, arguments, Path(scratch))
        print(f"{render_group(name, found[name])}\n", flush=True)
        if results:
            results.write_text(json.dumps(found, indent=1) + "\n")
            page = render_page(found, size)
            arguments.out.with_name(f"{arguments.out.name}.md").write_text(page)

    print(f"{describe_size(size)}\n\n{NOTES}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        is_whole = measure_rows(arguments.groups or GROUPS, arguments.seconds, measure)
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()
