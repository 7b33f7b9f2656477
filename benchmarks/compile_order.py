"""Compares all orders of torch.compile and data parallelism.

    python benchmarks/compile_order.py [--device cpu|cuda] [--nproc N] [--rounds 6] [--steps 8] [--out FILE.md]

Each order runs in separate processes. They are started and compiled one after the other, from an empty cache, and then
kept. In each round every order runs a few steps in turn while the others sleep, so that a drift of the machine's speed
affects all alike. All orders train the same model on the same batches, and their losses are compared with those of the
uncompiled model.
"""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.parts import find_layers
from echelon.learn.model.traits import apply_plain_causal, find_traits
from echelon.learn.model.weights import initialize_weights

WARMUP_STEPS = 4
SIZES = {
    "cpu": {"hidden": 256, "layers": 4, "length": 128, "batch": 4, "vocabulary": 2048},
    "cuda": {"hidden": 1024, "layers": 6, "length": 1024, "batch": 8, "vocabulary": 32000},
}


def each_layer(model):
    apply_compile(find_layers(model), "inductor")
    return model


def data_parallel(model, device):
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def sharded(model, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    for layer in find_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def whole(model):
    """Without DDPOptimizer, which splits a graph compiled inside DDP's forward at the ends of gradient buckets."""
    torch._dynamo.config.optimize_ddp = False
    return model


# From the innermost transform to the outermost.
ORDERS = {
    "DDP, not compiled": lambda model, device: data_parallel(model, device),
    "compile each layer, then DDP": lambda model, device: data_parallel(each_layer(model), device),
    "the same, graphs left whole": lambda model, device: data_parallel(whole(each_layer(model)), device),
    "compile the model, then DDP": lambda model, device: data_parallel(torch.compile(model), device),
    "torch.compile(DDP(model))": lambda model, device: torch.compile(data_parallel(model, device)),
    "fully_shard, not compiled": lambda model, device: sharded(model, device),
    "compile each layer, then fully_shard": lambda model, device: sharded(each_layer(model), device),
    "torch.compile(fully_shard(model))": lambda model, device: torch.compile(sharded(model, device)),
}


class Contestant:
    """One rank of one order: the wrapped and compiled model, and its optimizer."""

    def __init__(self, order, rank, size, device):
        config = load_config(
            {
                "model_type": "llama", "hidden_size": size["hidden"], "intermediate_size": size["hidden"] * 11 // 4,
                "num_hidden_layers": size["layers"], "num_attention_heads": size["hidden"] // 64,
                "num_key_value_heads": size["hidden"] // 64, "vocab_size": size["vocabulary"],
                "max_position_embeddings": size["length"],
            }
        )  # fmt: skip
        skeleton = build_on_meta(config)
        apply_plain_causal(skeleton, find_traits(skeleton, size["length"]))
        model = build_on_meta(config).to_empty(device="cpu")
        apply_plain_causal(model, find_traits(model, size["length"]))
        initialize_weights(model, skeleton, seed=0)
        self.device, self.size, self.generator = device, size, torch.Generator().manual_seed(rank)
        self.model = ORDERS[order](model.to(device).train(), device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        # As in echelon: DDP keeps fp32 parameters under autocast, fully_shard casts the gathered parameters.
        self.autocast = device.type == "cuda" and "DDP" in order

    def step(self):
        shape = (self.size["batch"], self.size["length"] + 1)
        tokens = torch.randint(0, self.size["vocabulary"], shape, generator=self.generator).to(self.device)
        with torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def steps(self, count):
        """Seconds and loss of each step; `loss.item()` waits for the device, the reduction for the other ranks."""
        timed = []
        for _ in range(count):
            started = time.perf_counter()
            loss = self.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            timed.append((time.perf_counter() - started, loss))
        return timed

    def reset_peak(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):  # Linux: reset the peak of resident memory
                Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self):
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def serve(order, rank, arguments, size, folder, connection):
    """Run one process: build, compile, then run steps on request until the connection closes."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.nproc))
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = dist.FileStore(f"{folder}/store", arguments.nproc)
        backend = "nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=300)
        dist.init_process_group(backend, store=store, rank=rank, world_size=arguments.nproc, timeout=limit)
        contestant = Contestant(order, rank, size, device)
        connection.send(contestant.steps(WARMUP_STEPS))
        contestant.reset_peak()
        while (count := connection.recv()) is not None:
            connection.send(contestant.steps(count))
        from torch._dynamo.utils import counters

        breaks = sum(counters["graph_break"].values())
        connection.send((counters["stats"]["unique_graphs"], breaks, contestant.peak_bytes()))
        with contextlib.suppress(EOFError):  # the others may still need this process
            connection.recv()
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send(error if isinstance(error, Exception) else RuntimeError(str(error)))
    os._exit(0)  # do not wait for threads of compilers and process groups


class Group:
    """The processes of one order, seen from the parent."""

    def __init__(self, order, arguments, size, folder):
        self.order, self.failure = order, None
        context = multiprocessing.get_context("spawn")
        self.times, self.losses = [], []
        pairs = [context.Pipe() for _ in range(arguments.nproc)]
        self.connections = [ours for ours, _ in pairs]
        for rank, (_, theirs) in enumerate(pairs):
            context.Process(target=serve, args=(order, rank, arguments, size, str(folder), theirs), daemon=True).start()
            theirs.close()
        self.warmup = self._receive()

    def run(self, count):
        if self.failure is None:
            self._send(count)
            first = self._receive()
            self.times += [seconds for seconds, _ in first or ()]
            self.losses += [loss for _, loss in first or ()]

    def finish(self):
        if self.failure is None:
            self._send(None)
            self.graphs, self.breaks, self.peak = self._receive() or (0, 0, 0)

    def _send(self, message):
        for connection in self.connections:
            connection.send(message)

    def _receive(self):
        """The answer of rank 0, after all ranks have answered."""
        try:
            answers = [connection.recv() for connection in self.connections]
        except EOFError:
            answers = [RuntimeError("a process died")]
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures:
            self.failure = f"{type(failures[0]).__name__}: {str(failures[0]).strip().splitlines()[0][:100]}"
            return None
        return answers[0]


def row(group, reference):
    if group.failure is not None:
        return f"| {group.order} | {group.failure} | | | | | | |"
    median = statistics.median(group.times)
    tenths = statistics.quantiles(group.times, n=10)
    compiling = sum(seconds for seconds, _ in group.warmup) - WARMUP_STEPS * median
    losses = zip(group.losses, reference.losses, strict=True) if reference.failure is None else ()
    difference = max((abs(ours - theirs) for ours, theirs in losses), default=float("nan"))
    return (
        f"| {group.order} | {compiling:.1f} | {1e3 * median:.1f} | {1e3 * tenths[0]:.1f} to {1e3 * tenths[-1]:.1f} "
        f"| {median / statistics.median(reference.times):.2f} | {group.graphs}, {group.breaks} "
        f"| {group.peak / 2**20:.0f} | {difference:.0e} |"
    )


def report(groups, arguments, size):
    reference = {"DDP": groups[0], "fully_shard": next(group for group in groups if "fully_shard, not" in group.order)}
    versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
    what = "allocated on the device" if arguments.device == "cuda" else "resident, compiler included"
    precision = "bf16" if arguments.device == "cuda" else "fp32"
    lines = [
        f"{device}, {arguments.nproc} processes, {versions}, Python {platform.python_version()}, {precision}",
        f"Llama with {size['layers']} layers of width {size['hidden']}, vocabulary {size['vocabulary']}, "
        f"{size['batch']} sequences of {size['length']} tokens per process; {arguments.rounds} rounds of "
        f"{arguments.steps} steps each",
        "",
        "| order | compiling, s | step, ms | 10th to 90th percentile | against not compiled | graphs, breaks "
        f"| peak MiB ({what}) | largest loss difference |",
        "|---|---|---|---|---|---|---|---|",
        *(row(group, reference["fully_shard" if "fully_shard" in group.order else "DDP"]) for group in groups),
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nproc", type=int, help="processes; default: one per GPU, or 2 on a CPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    for name, default in SIZES["cpu"].items():
        parser.add_argument(f"--{name}", type=int, help=f"default {default} on a CPU, {SIZES['cuda'][name]} on a GPU")
    arguments = parser.parse_args()
    if arguments.nproc is None:
        arguments.nproc = torch.cuda.device_count() if arguments.device == "cuda" else 2
    size = {name: getattr(arguments, name) or value for name, value in SIZES[arguments.device].items()}
    if arguments.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as scratch:
        groups = []
        for index, order in enumerate(ORDERS):
            folder = Path(scratch) / str(index)
            folder.mkdir()
            started = time.perf_counter()
            groups.append(Group(order, arguments, size, folder))
            print(f"{order}: ready after {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        for turn in range(arguments.rounds):
            for group in groups[turn % len(groups) :] + groups[: turn % len(groups)]:
                group.run(arguments.steps)
        for group in groups:
            group.finish()
    table = report(groups, arguments, size)
    print(table)
    if arguments.out is not None:
        arguments.out.write_text(table + "\n")


if __name__ == "__main__":
    main()
