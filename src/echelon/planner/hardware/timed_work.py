"""Times pieces of training work in one process of a calibration: `python -m echelon.planner.hardware.timed_work`.

All processes do the same at once, as in training: they share the memory of the machine, and of a CPU its cores. On a
CPU work is timed by the processor time of the process, so that other programs on the machine hardly matter;
collectives by elapsed time as well. Everything is measured several times over, and the median of the calls counts: a
step of training takes what its parts usually take, not what they take at best.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from echelon.planner.hardware.heap import keep_freed_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def inner_width(width: int) -> int:
    """The width between the products of an MLP of Llama: 8/3 of the hidden one, in whole sixteens."""
    return -(-8 * width // 3 // 16) * 16


def build_layer(width: int, head_dim: int) -> "torch.nn.Module":
    """A decoder layer of Llama, as it is trained."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    size = min(head_dim, width)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner_width(width),
        num_attention_heads=width // size,
        num_key_value_heads=width // size,
        head_dim=size,
        attn_implementation="sdpa",
    )
    layer: torch.nn.Module = LlamaDecoderLayer(config, 0)
    return layer


def pass_through(layers: "Sequence[Any]", hidden: "Tensor") -> Callable[[], None]:
    """The forward and the backward pass of layers, one after the other, with rotary positions that turn nothing.

    `hidden`: of shape (sequences, tokens, width).
    """
    shape = (1, hidden.shape[1], layers[0].self_attn.head_dim)
    positions = (hidden.new_ones(shape), hidden.new_zeros(shape))

    def step() -> None:
        passed: Any = hidden
        for layer in layers:
            passed = layer(passed, position_embeddings=positions)
        passed.sum().backward()
        for layer in layers:
            layer.zero_grad(set_to_none=True)

    return step


def divide_layer(layer: "torch.nn.Module", kind: str) -> None:
    """Divide the matrices over all processes; norms are distributed tensors that every process has, as in training."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    styles = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    parallelize_module(layer, mesh, styles)
    for name, module in layer.named_modules():
        if name.endswith("layernorm"):
            distribute_module(
                module,
                mesh,
                None,
                lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),  # type: ignore[arg-type]
                lambda _, output, mesh: output.to_local(),
            )


Row = tuple[str, dict[str, float]]
"""What was measured, and its values: sizes, and `seconds` of one call."""
_MEASURED = ("seconds", "backward", "processor", "work")  # the values that are not sizes

# Rows, inner and outer dim of the products: of narrow and wide layers. A GPU is many times as fast.
_PRODUCTS = {
    "cpu": (
        (1024, 128, 128),
        (2048, 128, 352),
        (1024, 256, 704),
        (1024, 704, 256),
        (2048, 384, 384),
        (512, 1024, 1024),
    ),
    "cuda": ((512, 512, 512), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 2048, 8192)),
}
# Tokens, heads and their dim.
_ATTENTION = {"cpu": ((256, 4, 32), (512, 4, 64)), "cuda": ((4096, 16, 128), (8192, 16, 128))}
_SMALLEST = {"cpu": (8, 16), "cuda": (8, 64)}  # tokens and width of a layer of hardly any size
# Sequences, their tokens, and the width of layers; and how many are stacked.
_LAYERS = {"cpu": ((8, 256, 128), (2, 256, 512)), "cuda": ((4, 2048, 2048), (2, 4096, 4096))}
_STACKED = 4
_WAITING = (256, 256)  # tokens and width of a layer between two collectives
_LOGITS = {"cpu": (256, 4096), "cuda": (4096, 32768)}
_UNCACHED = {"cpu": 2**26, "cuda": 2**27}  # bytes of different inputs, more than caches hold
_COPIED = {"cpu": 2**23, "cuda": 2**28}  # numbers of a copy, more than caches hold
_PAYLOADS = {"cpu": (4, 2**16, 2**20, 2**22), "cuda": (4, 2**20, 2**24, 2**28)}  # bytes of an all-reduce
_CALLS = 24  # of each collective
_WORK = 512  # the dims of the product before it, on a CPU
_SECONDS = 0.08  # for each measurement, at least three calls
_ROUNDS = 3  # of all measurements: the speed of a shared machine changes within seconds
_WAITS = 60  # collectives in the measurement of what processes wait for each other
_JOIN_SECONDS = 120
_HEAD_DIM = {"cpu": 32, "cuda": 128}


class Timer:
    """Measures calls on a device: processor time on a CPU, elapsed time on a GPU."""

    def __init__(self, device: "torch.device") -> None:
        self.device = device

    def read(self) -> float:
        """Seconds, once the device has done its work."""
        if self.device.type == "cpu":
            return time.process_time()
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()

    def measure(self, call: Callable[[], object]) -> float:
        """Seconds of one call: the median of several."""
        return self.measure_in_turns([call])[0]

    def measure_in_turns(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds of each call, the medians of several, all at the same time: a machine that is slower slows all."""
        for call in calls:
            call()
        seconds: list[list[float]] = [[] for _ in calls]
        ends = time.perf_counter() + 10 * _SECONDS * len(calls)  # under load processor time passes slowly
        while len(seconds[0]) < 3 or (sum(map(sum, seconds)) < _SECONDS * len(calls) and time.perf_counter() < ends):
            for taken, call in zip(seconds, calls, strict=True):
                began = self.read()
                call()
                taken.append(self.read() - began)
        return [statistics.median(taken) for taken in seconds]


def time_products(timer: Timer, dtype: "torch.dtype") -> Iterator[Row]:
    """The products of linear layers."""
    name = str(dtype).removeprefix("torch.")
    for rows, inner, outer in _PRODUCTS[timer.device.type]:
        build = partial(_build_products, timer.device, dtype, rows, inner, outer)
        seconds = timer.measure(_in_turn(build, timer.device, rows * inner + inner * outer + rows * outer, dtype))
        yield f"product {name}", {"rows": rows, "inner": inner, "outer": outer, "seconds": seconds}
        if seconds > _SECONDS:  # a type that the CPU emulates: larger products would take seconds
            return


def _build_products(
    device: "torch.device", dtype: "torch.dtype", rows: int, inner: int, outer: int
) -> Callable[[], object]:
    """The three products of a linear layer: its output, and the gradients of its input and of its weight."""
    import torch

    left = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(outer, inner, device=device, dtype=dtype)
    gradient = torch.randn(rows, outer, device=device, dtype=dtype)
    results = [torch.ones_like(tensor) for tensor in (gradient, left, weight)]  # in memory that is there
    factors = [(left, weight.T), (gradient, weight), (gradient.T, left)]

    def multiply() -> None:
        for pair, result in zip(factors, results, strict=True):
            torch.mm(*pair, out=result)

    return multiply


def _in_turn(
    build: Callable[[], Callable[[], object]], device: "torch.device", numbers: int, dtype: "torch.dtype"
) -> Callable[[], object]:
    """A call that does the work of another built one each time, so that no cache holds its inputs, as in training.

    `numbers`: of the inputs of one, of this dtype.
    """
    copies = -(-_UNCACHED[device.type] // (numbers * dtype.itemsize))
    turns = cycle([build() for _ in range(copies)])
    return lambda: next(turns)()


def time_attention(timer: Timer, dtype: "torch.dtype") -> Iterator[Row]:
    """Causal attention, forward and backward."""
    name = str(dtype).removeprefix("torch.")
    for tokens, heads, head_dim in _ATTENTION[timer.device.type]:
        numbers = 4 * tokens * heads * head_dim
        builds = [
            partial(_build_attention, timer.device, dtype, tokens, heads, head_dim, both) for both in (False, True)
        ]
        once, both = timer.measure_in_turns([_in_turn(build, timer.device, numbers, dtype) for build in builds])
        sizes = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
        yield f"attention {name}", {**sizes, "seconds": once, "backward": both - once}


def _build_attention(
    device: "torch.device", dtype: "torch.dtype", tokens: int, heads: int, head_dim: int, both: bool
) -> Callable[[], object]:
    """The forward pass of causal attention, or both passes."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    shape = (1, heads, tokens, head_dim)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=dtype)

    def forward() -> "Tensor":
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    return (lambda: torch.autograd.grad(forward(), (query, key, value), gradient)) if both else forward


def time_layers(timer: Timer, dtype: "torch.dtype") -> Iterator[Row]:
    """A decoder layer, forward and backward: of hardly any size, what the host needs to launch it; and of some sizes,
    each in a stack whose numbers no cache holds until the backward pass, as in training."""
    import torch

    def build(sequences: int, tokens: int, width: int, head_dim: int, count: int) -> Callable[[], None]:
        hidden = torch.randn(sequences, tokens, width, device=timer.device, dtype=dtype, requires_grad=True)
        layers = [build_layer(width, head_dim).to(timer.device, dtype) for _ in range(count)]
        return pass_through(layers, hidden)

    tokens, width = _SMALLEST[timer.device.type]
    yield "layer", {"seconds": timer.measure(build(1, tokens, width, width, 1))}
    for sequences, tokens, width in _LAYERS[timer.device.type]:
        head_dim = _HEAD_DIM[timer.device.type]
        seconds = timer.measure(build(sequences, tokens, width, head_dim, _STACKED)) / _STACKED
        sizes = {"sequences": sequences, "tokens": tokens, "width": width, "inner": inner_width(width)}
        yield "layers", {**sizes, "seconds": seconds}


def time_memory(timer: Timer, dtype: "torch.dtype") -> Iterator[Row]:
    """A copy of more than caches hold, and the loss of a chunk of logits."""
    import torch
    from torch.nn.functional import cross_entropy

    source = torch.ones(_COPIED[timer.device.type], device=timer.device)
    target = torch.empty_like(source)
    seconds = timer.measure(lambda: target.copy_(source))
    yield "copy", {"bytes": 2.0 * source.numel() * source.element_size(), "seconds": seconds}
    tokens, vocabulary = _LOGITS[timer.device.type]
    logits = torch.randn(tokens, vocabulary, device=timer.device, dtype=dtype, requires_grad=True)
    labels = torch.zeros(tokens, device=timer.device, dtype=torch.long)

    def loss() -> None:
        torch.autograd.grad(cross_entropy(logits.float(), labels, reduction="sum"), logits)

    yield "loss", {"logits": float(tokens * vocabulary), "seconds": timer.measure(loss)}


def time_collectives(device: "torch.device") -> Iterator[Row]:
    """Collectives of several sizes between all processes.

    `seconds`: elapsed. On a CPU each one comes after a piece of work, as in training, where a process that waits for a
    message gets a core late: the mean. On a GPU, and of the smallest size, the shortest of several calls on their own.
    `processor`: of a process, all its threads. `work`: of each piece.
    """
    import torch
    import torch.distributed as dist

    timer, square = Timer(device), torch.randn(_WORK, _WORK)
    for size in _PAYLOADS[device.type]:
        alone = device.type == "cuda" or size == min(_PAYLOADS[device.type])
        for name, call in _build_collectives(size // 4, device).items():
            call()  # opens connections
            elapsed, used, worked = [], [], []
            for _ in range(_CALLS):
                if alone:
                    dist.barrier()
                began, before = time.perf_counter(), timer.read()
                if not alone:
                    square @ square
                between = timer.read()
                call()
                after = timer.read()
                elapsed.append(time.perf_counter() - began - (between - before))
                used.append(after - between)
                worked.append(between - before)
            values = {"bytes": float(size), "processes": float(dist.get_world_size())}
            values["seconds"] = min(elapsed) if alone else statistics.fmean(elapsed)
            yield name, values | {"processor": statistics.fmean(used), "work": statistics.fmean(worked)}


def _build_collectives(count: int, device: "torch.device") -> dict[str, Callable[[], object]]:
    """The collectives of data parallelism for `count` numbers, with the copies that `fully_shard` makes of them: a
    layer is gathered from shards and divided into its parameters, its gradients are joined and summed into a shard."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    payload, shard = torch.ones(count, device=device), torch.ones(-(-count // ranks), device=device)
    whole, received = (torch.empty(ranks * shard.numel(), device=device) for _ in range(2))
    parameters = torch.empty_like(whole)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, shard)
        parameters.copy_(whole)

    def scatter() -> None:
        whole.copy_(parameters)
        if device.type == "cuda":
            dist.reduce_scatter_tensor(shard, whole)
        else:  # as in learn/parallel/data_parallel.py
            dist.all_to_all_single(received, whole)
            torch.sum(received.view(ranks, -1), dim=0, out=shard)

    return {"all_reduce": lambda: dist.all_reduce(payload), "all_gather": gather, "reduce_scatter": scatter}


def time_waits(timer: Timer, dtype: "torch.dtype") -> Iterator[Row]:
    """The work of a layer and an all-reduce of 4 bytes, in turn: a process that is done first waits for the others.

    `seconds`: elapsed. `work`: processor time. Only on a CPU; the host of a GPU runs ahead.
    """
    import torch
    import torch.distributed as dist

    if timer.device.type == "cuda":
        return
    tokens, width = _WAITING
    hidden, payload = torch.randn(1, tokens, width, dtype=dtype), torch.ones(1)
    step = pass_through([build_layer(width, _HEAD_DIM["cpu"]).to(dtype)], hidden)
    step()
    dist.barrier()
    began, before = time.perf_counter(), timer.read()
    for _ in range(_WAITS):
        step()
        dist.all_reduce(payload)
    values = {"seconds": time.perf_counter() - began, "work": timer.read() - before}
    yield "waits", {"times": float(_WAITS), "processes": float(dist.get_world_size()), **values}


def time_wrappers(timer: Timer, dtype: "torch.dtype") -> Iterator[Row]:
    """A layer of hardly any size: whole, `fully_shard` over one rank and over all, and divided for tensor parallelism.

    The difference is what hooks and the dispatch of distributed tensors cost, and collectives of hardly any bytes.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    tokens, head_dim = _SMALLEST[timer.device.type]
    width = head_dim * dist.get_world_size()
    hidden = torch.randn(1, tokens, width, device=timer.device, dtype=dtype, requires_grad=True)
    forms = ("whole", "wrapped", "sharded", "divided")
    layers = {name: build_layer(width, head_dim).to(timer.device, dtype) for name in forms}
    meshes = init_device_mesh(timer.device.type, (1, dist.get_world_size()), mesh_dim_names=("one", "all"))
    for name, mesh in (("wrapped", meshes["one"]), ("sharded", meshes["all"])):
        fully_shard(layers[name], mesh=mesh, reshard_after_forward=True)
    divide_layer(layers["divided"], timer.device.type)
    steps = {name: pass_through([layer], hidden) for name, layer in layers.items()}
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(13):  # as often on every rank
        for name, step in steps.items():
            began = timer.read()
            step()
            taken[name].append(timer.read() - began)
    for name, seconds in taken.items():
        yield name, {"seconds": statistics.median(seconds[1:])}  # the first call sets up buffers


def take_medians(rows: Iterable[Row]) -> list[Row]:
    """One row for each piece of work, with the medians of what was measured."""
    by_work: dict[tuple[str, frozenset[tuple[str, float]]], list[dict[str, float]]] = {}
    for name, values in rows:
        sizes = frozenset((key, value) for key, value in values.items() if key not in _MEASURED)
        by_work.setdefault((name, sizes), []).append(values)
    return [
        (name, {key: statistics.median(row[key] for row in same) for key in same[0]})
        for (name, _), same in by_work.items()
    ]


def _time_once(device: "torch.device") -> Iterator[Row]:
    """One round of all measurements, those of collectives last."""
    import torch
    import torch.distributed as dist

    timer, low = Timer(device), torch.bfloat16
    training = torch.float32 if device.type == "cpu" else low
    for dtype in (torch.float32, low):
        dist.barrier()
        yield from time_products(timer, dtype)
    for measure in (time_attention, time_layers, time_memory):
        dist.barrier()
        yield from measure(timer, training)
    if dist.get_world_size() > 1:
        yield from time_wrappers(timer, training)
        yield from time_collectives(device)
        yield from time_waits(timer, training)


def main(store: str, rank: int, world_size: int) -> None:
    """Join the other processes through a file, measure, and write the rows to stdout as JSON, on rank 0."""
    import torch
    import torch.distributed as dist

    keep_freed_memory()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_JOIN_SECONDS),
    )
    rows = take_medians(row for _ in range(_ROUNDS) for row in _time_once(device))
    dist.barrier()
    if rank == 0:
        sys.stdout.write(f"{json.dumps(rows)}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
