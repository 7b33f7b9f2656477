"""What a plan sends in one step: the formulas of docs/strategies.md, to be held against what the ranks really send."""

import contextlib
import os
import socket
import stat
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import DTYPE_BYTES, ParallelPlan

_BYTES_SENT_AT = 200  # of tcpi_bytes_sent in struct tcp_info: linux/tcp.h, since Linux 4.19


@dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors that one rank's collectives make whole (gather) or take apart (scatter, all_reduce)."""

    gather: int = 0
    scatter: int = 0
    all_reduce: int = 0

    def sent_bytes(self, plan: ParallelPlan) -> float:
        """Bytes that each rank sends, by ring algorithms over the plan's axes."""
        outer = plan.dp_replicate
        share = 1 - 1 / plan.dp_shard
        return share * (self.gather + self.scatter) + 2 * (1 - 1 / outer) * self.all_reduce


def expect_traffic(plan: ParallelPlan, shape: ModelShape) -> Traffic:
    """The table "What a step sends" of docs/strategies.md, for models whose sizes divide evenly."""
    whole, micro = shape.num_parameters, plan.num_microbatches
    compute, reduce = DTYPE_BYTES[plan.precision.compute], DTYPE_BYTES[plan.precision.reduce]
    if plan.dp_shard == 1:
        return Traffic(all_reduce=4 * whole)
    layers = shape.num_layers * shape.num_layer_parameters
    gathered = micro * (whole + layers) if plan.reshard_after_forward else whole
    reductions = micro if plan.reduce_gradients == "each" else 1
    shard = whole // plan.dp_shard if plan.dp_replicate > 1 else 0
    return Traffic(compute * gathered, reductions * reduce * whole, reduce * shard)


def expect_muon_bytes(plan: ParallelPlan, shape: ModelShape) -> float:
    """Bytes that each rank sends on average in a step of Muon, on one machine: docs/strategies.md."""
    numbers = sum(each.count * each.size for each in shape.linears)
    if plan.dp_shard > 1:
        return 4 * numbers / plan.dp_shard * (1 - 1 / plan.dp_shard)
    return 2 * numbers * (1 - 1 / plan.dp_replicate)


def plan_strategies(ranks: int, **options: Any) -> list[ParallelPlan]:
    """A plan of each strategy for this many ranks; `options`: other fields of ParallelPlan."""
    sharded = {"dp_shard": ranks, **options}
    resharded = {**sharded, "reduce_gradients": "each", "reshard_after_forward": True}
    plans = [
        ParallelPlan("ddp", dp_replicate=ranks, **options),
        ParallelPlan("zero1", **sharded),
        ParallelPlan("zero2", **sharded, reduce_gradients="each"),
        ParallelPlan("fsdp", **resharded),
    ]
    if ranks > 2:
        plans.append(ParallelPlan("hsdp", **{**resharded, "dp_shard": ranks // 2}, dp_replicate=2))
    return plans


class TrafficCounter(TorchDispatchMode):
    """Counts the payload of every collective inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.bytes[function.__name__.split(".")[0]] += max(map(_size, _tensors(args)))
        return function(*args, **(kwargs or {}))

    @property
    def traffic(self) -> Traffic:
        """What was counted. Raises KeyError for a collective that no plan is known to use."""
        known = {
            "_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "all_reduce",
            "alltoall_base_": "scatter",  # a reduce-scatter over gloo: parallel/gloo_scatter.py
        }  # fmt: skip
        return Traffic(**{known[name]: count for name, count in self.bytes.items()})


def read_sent_bytes() -> dict[tuple[Any, Any], int]:
    """The bytes that this process has sent through each TCP connection, by its two addresses, headers excluded.

    Linux only: tcp(7).
    """
    sent = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
        except OSError:
            continue  # the listing itself was open
        with socket.socket(fileno=os.dup(int(name))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                information = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT_AT + 8)
                with contextlib.suppress(OSError):  # a listening socket has no peer, and sends nothing
                    addresses = each.getsockname(), each.getpeername()
                    sent[addresses] = struct.unpack_from("Q", information, _BYTES_SENT_AT)[0]
    return sent


def count_sent_bytes(before: dict[tuple[Any, Any], int]) -> int:
    """The bytes sent since `before`, a result of `read_sent_bytes`, without those of connections closed meanwhile."""
    return sum(sent - before.get(addresses, 0) for addresses, sent in read_sent_bytes().items())


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if hasattr(value, "numel") else []


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
