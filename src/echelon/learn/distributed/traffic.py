"""Counts the bytes that this rank sends in collectives, where torch dispatches them, for every caller and backend."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C import DispatchKey
from torch.distributed import ProcessGroup
from torch.library import Library


class _Rule(NamedTuple):
    """What one rank of n sends: `share(n)` of the bytes of the argument at `place`."""

    kind: str
    place: int
    share: Callable[[int], float]


def _part(size: int) -> float:
    return 1 - 1 / size


# The operators of torch's c10d, by the bytes that a rank sends in a ring. Where only one rank sends or receives
# everything (broadcast, reduce, gather, scatter), it is the average over ranks.
_RULES = {
    "allreduce_": _Rule("all_reduce", 0, lambda size: 2 * _part(size)),
    "allreduce_coalesced_": _Rule("all_reduce", 0, lambda size: 2 * _part(size)),
    "allgather_": _Rule("all_gather", 1, lambda size: size - 1),
    "allgather_coalesced_": _Rule("all_gather", 1, lambda size: size - 1),
    "allgather_into_tensor_coalesced_": _Rule("all_gather", 1, lambda size: size - 1),
    "_allgather_base_": _Rule("all_gather", 1, lambda size: size - 1),
    "reduce_scatter_": _Rule("reduce_scatter", 0, lambda size: size - 1),
    "reduce_scatter_tensor_coalesced_": _Rule("reduce_scatter", 0, lambda size: size - 1),
    "_reduce_scatter_base_": _Rule("reduce_scatter", 0, lambda size: size - 1),
    "alltoall_": _Rule("all_to_all", 1, _part),
    "alltoall_base_": _Rule("all_to_all", 1, _part),
    "broadcast_": _Rule("broadcast", 0, _part),
    "reduce_": _Rule("reduce", 0, _part),
    "gather_": _Rule("gather", 1, _part),
    "scatter_": _Rule("scatter", 0, _part),
    "send": _Rule("send", 0, lambda size: 1.0),
}  # fmt: skip


class CollectiveKind(NamedTuple):
    """Collectives of one kind over groups of one name."""

    group: str
    kind: str


class TrafficMeter:
    """The bytes that this process has sent in collectives, by route. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[CollectiveKind] = Counter()
        self._total = self._taken = 0.0

    def take(self) -> float:
        """Return the bytes sent since the last call."""
        with self._lock:
            taken, self._taken = self._total - self._taken, self._total
        return taken

    def by_route(self) -> dict[CollectiveKind, float]:
        """Return the bytes sent so far."""
        with self._lock:
            return dict(self._sent)

    def add(self, route: CollectiveKind, sent: float) -> None:
        """Count a collective."""
        with self._lock:
            self._sent[route] += sent  # type: ignore[assignment]
            self._total += sent


@cache
def count_traffic() -> TrafficMeter:
    """Return the meter of this process, which counts every collective from the first call on.

    torch has one table of operators per process. The kernels added here run before those of the backend, and call them.
    """
    meter = TrafficMeter()
    library = Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, rule in _RULES.items():
        kernel = _build_kernel(name, rule, meter)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    return meter


_LIBRARIES: list[Library] = []  # a library that is deleted takes its kernels with it


def stop_counting() -> None:
    """Take the kernels out of torch's table again. The next call of `count_traffic` counts with another meter."""
    while _LIBRARIES:
        _LIBRARIES.pop()._destroy()  # type: ignore[no-untyped-call]
    count_traffic.cache_clear()


def _build_kernel(name: str, rule: _Rule, meter: TrafficMeter) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    below = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)

    def kernel(keys: Any, *arguments: Any) -> Any:
        group = ProcessGroup.unbox(next(argument for argument in arguments if isinstance(argument, ScriptObject)))
        size = group.size()
        if size > 1:
            share = rule.share(size)
            if name == "alltoall_base_" and arguments[4]:  # parts of different sizes
                share = 1 - arguments[4][group.rank()] / max(1, sum(arguments[4]))
            meter.add(
                CollectiveKind(name_group(group), rule.kind), share * sum(map(_nbytes, _flatten(arguments[rule.place])))
            )
        return operator.redispatch(keys & below, *arguments)

    return kernel


def name_group(group: ProcessGroup) -> str:
    """Return the name of a process group for the user: its axes. DeviceMesh calls the group of an axis mesh_AXIS."""
    if group is dist.group.WORLD:
        return "everyone"
    name = group.group_desc.removeprefix("mesh_")
    return {"shard": "dp_shard", "default_pg": "everyone"}.get(name, name)


def _flatten(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from _flatten(part)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
