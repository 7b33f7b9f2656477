"""What a plan sends in a step: the formulas of docs/memory-and-traffic.md, to compare with what ranks really send."""

import contextlib
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import ScriptObject
from torch._library.custom_ops import OPDEFS
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
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
    """The table "What a step sends" of docs/memory-and-traffic.md, for models whose sizes divide evenly."""
    whole, micro = shape.num_parameters, plan.num_microbatches
    compute, reduce = DTYPE_BYTES[plan.precision.compute], DTYPE_BYTES[plan.precision.reduce]
    if plan.dp_shard == 1:
        return Traffic(all_reduce=4 * whole)
    layers = shape.num_layers * shape.num_layer_parameters
    gathered = micro * (whole + layers) if plan.reshard_after_forward else whole
    reductions = micro if plan.reduce_gradients == "each" else 1
    shard = whole // plan.dp_shard if plan.dp_replicate > 1 else 0
    return Traffic(compute * gathered, reductions * reduce * whole, reduce * shard)


@dataclass(frozen=True)
class Sent:
    """The collectives of one kind over one axis: their number, and the bytes of the tensors, whole."""

    calls: int = 0
    bytes: int = 0


def expect_tensor_traffic(plan: ParallelPlan, shape: ModelShape, num_tokens: int) -> dict[str, Sent]:
    """The table of docs/tensor-parallelism.md: the collectives of one microbatch over the axis `tp`, by kind.

    For models with RMS norms, whose loss is computed in one chunk.
    """
    layers, compute = shape.num_layers, DTYPE_BYTES[plan.precision.compute]
    stream = num_tokens * shape.hidden_size * compute
    loss = Sent(2, 3 * 4 * num_tokens)
    head_norms = 2 * layers * shape.parts.head_norms
    norms = Sent(head_norms, head_norms * shape.head_dim * compute)
    routers = round(layers * shape.expert_widths[0])
    weights = Sent(routers, routers * num_tokens * shape.num_chosen_experts * compute)
    other = [loss, norms, weights]
    if not plan.sequence_parallel:
        sums = 4 * layers + 2
        return {"all_reduce": _total(Sent(sums, sums * stream), *other)}
    gathers, scatters, others = 4 * layers + 2, 4 * layers + 1, shape.parts.num_norms * layers + 1
    layer_norms = Sent(others, others * shape.hidden_size * compute)
    return {
        "all_gather": Sent(gathers, gathers * stream),
        "reduce_scatter": Sent(scatters, scatters * stream),
        "all_reduce": _total(Sent(1, stream), layer_norms, *other),
    }


def _total(*each: Sent) -> Sent:
    return Sent(sum(sent.calls for sent in each), sum(sent.bytes for sent in each))


def expect_muon_bytes(plan: ParallelPlan, shape: ModelShape) -> float:
    """Bytes that each rank sends on average in a step of Muon, on one machine: docs/memory-and-traffic.md."""
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


# Collectives as c10d and DTensor call them.
_KINDS = {
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all", "send": "send", "recv_": "receive",
}  # fmt: skip


class TrafficCounter(TorchDispatchMode):
    """Counts the payload of every collective inside its block."""

    def __init__(self, axes: Mapping[str, str] | None = None) -> None:
        """`axes`: names of the axes by the names of their process groups, for `by_axis`."""
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.by_axis: dict[tuple[str, str], Sent] = {}
        self._axes = axes or {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor runs first, on local tensors, and calls the collectives
        name = function.__name__.split(".")[0]
        if function.namespace == "echelon":
            with self:  # it sends
                return OPDEFS[function._schema.name]._init_fn(*args)
        if function.namespace == "c10d":
            size = max(map(_size, _tensors(args)))
            self.bytes[name] += size
            group = next(each for each in args if isinstance(each, ScriptObject))  # before the operation, if any
            self._count(name, ProcessGroup.unbox(group).group_name, size)
        elif function.namespace == "_c10d_functional" and name != "wait_tensor":
            # A gather is given the part of a rank, and the number of ranks.
            size = _size(args[0]) * (args[1] if name == "all_gather_into_tensor" else 1)
            self._count(name, args[-1], size)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, group: str, size: int) -> None:
        if (axis := self._axes.get(group)) is not None:
            kind = _KINDS[name]
            before = self.by_axis.get((axis, kind), Sent())
            self.by_axis[axis, kind] = Sent(before.calls + 1, before.bytes + size)

    @property
    def traffic(self) -> Traffic:
        """What was counted. Raises KeyError for a collective that no plan is known to use."""
        known = {
            "_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "all_reduce",
            "alltoall_base_": "scatter",  # a reduce-scatter over gloo: learn/parallel/data_parallel.py
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
