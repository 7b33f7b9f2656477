"""One rank of many on one GPU. The others are ghosts: what they would send takes its time, and has this rank's numbers.

    python benchmarks/ghosts.py [ROW ...] [--size tiny]

A collective copies what this rank has to where the others' parts would be, and holds the stream of its communicator for
latency + bytes / bandwidth, by NCCL's formulas for rings. So memory is that of a rank to the byte, and a step shows
which part of the communication is exposed: the same steps without that time are the difference. Blocks with and without
it take turns. Weights are drawn at random; the losses mean nothing. The model is Llama 3.1 with 8 billion parameters.

It is believable if torchtitan, unmodified under the same ghosts, is as fast as it was on real GPUs: *of published*.
Those were H100 of 500 W, with 2.4 TB/s (torchtitan's benchmarks/llama3_h100_202412_torchtitan.md); another GPU is not
expected to agree. Not shown: that NCCL's kernels take a part of the GPU and of its bandwidth.
`--size tiny` tries it on a CPU, where nothing is exposed: the time is only added up.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import pretraining
from measuring import describe_machine, measure_rows, peak_bytes, reset_peak
from sides import repeat_batches
from turns import find_error

WIDTHS = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LENGTH, MICRO, STEPS = 8192, 2, 3
IS_ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Row:
    """Who trains, and how. parallel: echelon's plan; None: torchtitan. published: tokens per second and GPU."""

    parallel: str | None = None
    ranks: int = 8
    precision: str = "bf16"
    published: float | None = None


ROWS = {
    "torchtitan": Row(published=6667),
    "echelon, zero2": Row("zero2"),
    "echelon, fsdp": Row("fsdp"),
    "torchtitan, float8": Row(precision="fp8", published=8532),
    "echelon, fsdp, float8": Row("fsdp", precision="fp8"),
    "echelon, fsdp on 64": Row("fsdp", ranks=64),
}


class Line:
    """The time that communication takes over a link. `seconds`: the sum; `is_free`: whether it takes none now."""

    seconds, is_free = 0.0, False

    def __init__(self, link):
        self._link, self._cycles = link, measure_cycles() if IS_ON_GPU else 0.0

    def hold(self, num_bytes):
        """Hold the current stream for as long as it takes to send so many bytes."""
        seconds = self._link.latency + num_bytes / self._link.bandwidth
        self.seconds += seconds
        if IS_ON_GPU and not self.is_free:
            torch.cuda._sleep(int(seconds * self._cycles))


def measure_cycles():
    """Cycles per second of `torch.cuda._sleep`, beside a product: the clock is lower under load."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side, ends = torch.cuda.Stream(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(200):
        left @ left
    with torch.cuda.stream(side):
        ends[0].record()
        torch.cuda._sleep(100_000_000)
        ends[1].record()
    torch.cuda.synchronize()
    return 100_000_000 / (ends[0].elapsed_time(ends[1]) / 1000)


class Sent(dist.Work):
    """What a collective of ghosts returns. It keeps the tensors until a stream waits for it, as NCCL does."""

    def __init__(self, tensors, end):
        super().__init__()
        self._tensors, self._end = tensors, end

    def wait(self, timeout=None):
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
        self._tensors = None
        return True


class Ghosts(dist.ProcessGroup):
    """A group of which only this rank is here. torch 2.13 has other names for some of its methods than 2.11."""

    line: Line

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._stream = torch.cuda.Stream() if IS_ON_GPU else None

    @property
    def group_name(self):
        """torch sets no name in a group of another class."""
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self):
        return "ghosts"

    def _send(self, tensors, num_bytes, fill=lambda: None):
        """Fill the results, and take the time of so many bytes, in this group's stream."""
        if self._stream is None:
            fill()
            self.line.hold(num_bytes)
            return Sent(tensors, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            fill()
            self.line.hold(num_bytes)
            return Sent(tensors, self._stream.record_event())

    def _others(self, tensor):
        """The bytes that a rank receives of a tensor of which each rank has as much."""
        return tensor.nbytes * (self.size() - 1) / self.size()

    def all_gather_single(self, whole, part, opts=None):
        rows = whole.view(self.size(), -1)[part.data_ptr() == whole.data_ptr() :]  # it may be the first row already
        return self._send((whole, part), self._others(whole), lambda: rows.copy_(part.view(1, -1)))

    def reduce_scatter_single(self, part, whole, opts=None):
        mine = whole.view(self.size(), -1)[self.rank()]
        return self._send((part, whole), self._others(whole), lambda: part.view(-1).copy_(mine))

    def all_to_all_single(self, received, sent, output_sizes=None, input_sizes=None, opts=None):
        return self._send(
            (received, sent), self._others(sent), lambda: received.numel() == sent.numel() and received.copy_(sent)
        )

    def allgather(self, wholes, parts, opts=None):
        fill = lambda: [each.copy_(parts[0]) for each in wholes[0]]  # noqa: E731
        return self._send((wholes, parts), parts[0].nbytes * (self.size() - 1), fill)

    def allreduce(self, tensors, opts=None):
        return self._send(tensors, 2 * sum(map(self._others, tensors)))

    def broadcast(self, tensors, opts=None):
        return self._send(tensors, sum(each.nbytes for each in tensors))

    def barrier(self, opts=None):
        return self._send((), 0)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    gather, allreduce_coalesced = allgather, allreduce


class Blocks:
    """Asks a side for blocks of steps, in turns without and with the time of communication; the first one warms up.

    `told`: what the side has measured of each block.
    """

    def __init__(self, line, rounds):
        self._line, self._number, self.told = line, 1 + 2 * rounds, []

    def wait(self):
        self._line.is_free = len(self.told) % 2 == 1
        self._line.seconds = 0.0
        return len(self.told) < self._number

    def tell(self, **measured):
        self.told.append(measured | {"line": self._line.seconds})
        if len(self.told) == 1:
            reset_peak()


def form_group(ranks):
    """Make this process rank 0 of many; every group that it forms is of ghosts. Returns its line."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from echelon.planner.hardware.links import usual_links

    links = usual_links("H100")
    Ghosts.line = Line(links.inside if ranks <= 8 else links.between)
    devices = ["cpu", "cuda"]
    dist.Backend.register_backend("ghosts", lambda store, rank, size, timeout: Ghosts(rank, size), devices=devices)
    dist.init_process_group("ghosts", store=FakeStore(), rank=0, world_size=ranks)
    return Ghosts.line


def train_echelon(row, folder, is_tiny, rounds):
    """The blocks of echelon's trainer, and the peak that the plan predicts."""
    from echelon.learn.distributed.runtime import Runtime
    from echelon.planner.hardware.accelerators import parse_devices
    from echelon.planner.memory import MemoryEstimate
    from echelon.recipe.load import load_recipe
    from echelon.run.lifecycle.setup import prepare_run

    pretraining.write_text(folder / "text.jsonl")
    widths = () if is_tiny else [f"model.config.{name}={value}" for name, value in WIDTHS.items()]
    like = pretraining.Row(length=LENGTH, sequences=MICRO * row.ranks, overrides=(
        *widths, f"parallel={row.parallel}", f"train.precision={row.precision}",
        f"train.compile={str(not is_tiny or row.precision == 'fp8').lower()}",
        "train.tokens=null", "train.steps=100", "optim.warmup=10",
    ))  # fmt: skip
    recipe, _ = load_recipe(pretraining.RECIPE, pretraining.override(like, folder, folder / "echelon", is_tiny))
    run = prepare_run(recipe, False, lambda: parse_devices(f"{row.ranks}xH100"), {})
    predicted = MemoryEstimate(**json.loads(run.folder.estimate_path.read_text())["memory"]).total
    blocks = Blocks(form_group(row.ranks), rounds)
    device = torch.device("cuda", 0) if IS_ON_GPU else torch.device("cpu")
    runtime = Runtime(0, row.ranks, 0, min(row.ranks, 8), device, "ghosts")
    new_group = dist.new_group
    with (
        mock.patch("sides.start_runtime", lambda: runtime),
        mock.patch("echelon.learn.checkpoint.store.CheckpointStore.rehearse"),  # nothing is saved
        mock.patch.object(dist, "new_group", lambda *given, **more: new_group(*given, **more | {"backend": "ghosts"})),
    ):
        pretraining.run_echelon({"run": run.folder.path, "chunk_bytes": None, "kernel": None}, STEPS, blocks)
    return blocks, predicted


def train_torchtitan(row, folder, is_tiny, rounds):
    """The blocks of torchtitan's Trainer, with the settings of its published table."""
    from transformers import LlamaConfig

    import titan

    def adjust(job):
        job.training.global_batch_size *= row.ranks
        job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option = "selective", "op"
        if row.precision == "fp8":
            job.model.converters = ["quantize.linear.float8"]
            float8 = job.quantize.linear.float8
            float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = True
            float8.filter_fqns, float8.emulate = ["output"], not IS_ON_GPU

    tiny = dict(each.split("=") for each in pretraining.TINY)
    config = LlamaConfig(**{name: int(value) for name, value in tiny.items()} if is_tiny else WIDTHS)
    length = LENGTH // pretraining.SHRINK if is_tiny else LENGTH
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(64, length + 1))
    batches = repeat_batches(tokens[:, :-1], tokens[:, 1:], MICRO, 1)
    blocks = Blocks(form_group(row.ranks), rounds)
    titan.train_in_blocks(
        blocks, config, STEPS, batches, length, MICRO, 1, not is_tiny, True, str(folder), adjust=adjust
    )  # fmt: skip
    return blocks, None


def run_row(row, is_tiny):
    """Train a row in this process; print its cells as JSON."""
    train = train_torchtitan if row.parallel is None else train_echelon
    with tempfile.TemporaryDirectory() as folder:
        blocks, predicted = train(row, Path(folder), is_tiny, 1 if is_tiny else 3)
    free, paid = ([statistics.median(block["seconds"]) for block in blocks.told[first::2]] for first in (1, 2))
    seconds, line = statistics.median(paid), blocks.told[-1]["line"] / STEPS
    speed = blocks.told[-1]["targets"] / STEPS / seconds
    share = None if row.published is None else speed / row.published
    verdict = "" if share is None else f"{share:.1%}, {'' if abs(share - 1) <= 0.05 else 'not '}within 5 %"
    cells = [
        row.ranks, f"{speed:,.0f}", f"{min(paid):.3f} to {max(paid):.3f}", f"{1000 * line:.1f}",
        f"{1000 * (seconds - statistics.median(free)):.1f}" if IS_ON_GPU else "not on a CPU", f"{peak_bytes():,}",
        "" if predicted is None else f"{predicted:,}", verdict,
    ]  # fmt: skip
    print(f"CELLS {' | '.join(map(str, cells))}", flush=True)


def measure(name, size):
    """Train a row in a process of its own, and print its line."""
    command = [sys.executable, __file__, "--alone", name, "--size", size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    cells = [line.removeprefix("CELLS ") for line in done.stdout.splitlines() if line.startswith("CELLS ")]
    if done.returncode or not cells:
        print(done.stderr[-3000:], file=sys.stderr)
        raise RuntimeError(find_error(done.stderr.strip() or "it ended without a message"))
    print(f"| {name} | {cells[0]} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row that would end later than this")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test of this program")
    parser.add_argument("--alone", choices=ROWS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        run_row(ROWS[given.alone], given.size == "tiny")
        return
    print(f"{describe_machine('torch', 'transformers')}; {STEPS} steps a block\n")
    print("| row | ranks | tokens/s of a GPU | seconds of a step | ms of communication | ms exposed | peak bytes "
          "| planned bytes | of published |\n|---|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip

    def measure_row(name):
        side = "echelon" if ROWS[name].parallel else "torchtitan"
        pretraining.check_needs([pretraining.Row(side, float8=ROWS[name].precision == "fp8")])
        measure(name, given.size)

    sys.exit(not measure_rows(given.rows, given.seconds, measure_row))


if __name__ == "__main__":
    main()
