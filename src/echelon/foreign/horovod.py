"""The engine `horovod`: starts Horovod over the ranks of the process group, and builds the native engine, whose
gradients Horovod sums."""

import importlib
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.launch_environment import (
    Rendezvous,
    find_place,
    find_rendezvous,
    find_socket_interface,
    has_horovod_store,
    has_mpi,
)
from echelon.ground.sizes import render_bytes
from echelon.ground.sockets import is_loopback
from echelon.ground.variables import read_environment, read_int, set_variables
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.distributed.peers import Isolatable
from echelon.learn.distributed.traffic import CollectiveKind, count_traffic
from echelon.learn.engines.engine import EngineSpec
from echelon.learn.engines.native import NativeEngine
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.data_parallel import Alone, Autocast, autocast_scope
from echelon.learn.parallel.step import DataParallel
from echelon.planner.plan import ParallelPlan

DEFAULT_FUSION_MB = 128  # Horovod's own


def build_horovod_engine(spec: EngineSpec) -> NativeEngine:
    """Start Horovod over the ranks of the job, and build the native engine around its sums. Collective.

    Raises ConfigError if Horovod is not installed, and LaunchError if its ranks are not those of the job.
    """
    variables = spec.recipe.launch.env
    hvd = start_horovod(variables)
    group_bytes, in_fp16 = find_group_bytes(variables), spec.recipe.horovod.compression == "fp16"

    def sum_by_horovod(module: ObjectiveModule, plan: ParallelPlan, meshes: Meshes, seed: int) -> DataParallel:
        return HorovodSum(module, autocast_scope(plan, meshes.device_type), hvd, group_bytes, in_fp16)

    sends = f"horovod: gradients are summed in groups of at most {render_bytes(group_bytes)}"
    lossy = ", in fp16; lossy: the losses are not those of horovod.compression: none" if in_fp16 else ""
    return build_native_engine(spec, parallelize=sum_by_horovod, description=[sends + lossy])


class _Seat(NamedTuple):
    """Where a rank runs: its machine, and its place among the ranks there."""

    machine: str
    local_rank: int
    local_size: int


def import_horovod() -> Any:
    """Return the module `horovod.torch`. Raises ConfigError if it is not installed, or built for another torch."""
    how = "build it for this Python and this torch, as in docs/horovod.md"
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ConfigError(f"engine=horovod: the package horovod cannot be imported ({error}); {how}.") from error
    if not hasattr(hvd, "init"):  # the package prints the reason and can be imported all the same
        raise ConfigError(f"engine=horovod: the installed horovod has no extension that this torch can load; {how}.")
    return hvd


def start_horovod(given: Mapping[str, str]) -> Any:
    """Start Horovod, once in a process; return `horovod.torch`. Collective over the default process group.

    `given`: the variables of the recipe.

    Raises:
        ConfigError: Horovod is not installed.
        LaunchError: Horovod's ranks are not those of the process group, or cannot meet.
    """
    hvd = import_horovod()
    if not hvd.is_initialized():
        set_variables(_build_settings(given))
        if not has_horovod_store() and not (has_mpi() and hvd.mpi_built()):
            set_variables(_place_ranks())
        hvd.init()
    check_ranks(hvd.rank(), hvd.size())
    return hvd


def check_ranks(rank: int, size: int) -> None:
    """Raise LaunchError unless Horovod's rank and number of ranks are those of the process group."""
    if (rank, size) != (dist.get_rank(), dist.get_world_size()):
        raise LaunchError(
            f"Horovod started as rank {rank} of {size}, but this process is rank {dist.get_rank()} of the "
            f"{dist.get_world_size()} of the job; start all processes with one launcher, and unset HOROVOD_* variables "
            "that are left of another one."
        )


def find_group_bytes(given: Mapping[str, str]) -> int:
    """The bytes of gradients that Horovod sums at once, by the variables of the recipe and of the process."""
    return read_int({**read_environment(), **given}, "HOROVOD_FUSION_THRESHOLD", DEFAULT_FUSION_MB * 2**20)


def _build_settings(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that Horovod reads as it starts.

    Gradients of one group are summed together, and never with those of another one: which groups are ready at the same
    moment differs from step to step, and sums depend on the position in the buffer.
    """
    variables = {name: value for name, value in given.items() if name.startswith("HOROVOD_")}
    return {**variables, "HOROVOD_FUSION_THRESHOLD": str(find_group_bytes(given)), "HOROVOD_DISABLE_GROUP_FUSION": "1"}


def _place_ranks() -> dict[str, str]:
    """The variables of this rank that `horovodrun` would set, with a store on rank 0. Collective."""
    place, rendezvous = find_place(), find_rendezvous()
    machine = platform.node() if rendezvous is None or rendezvous.own_address is None else rendezvous.own_address
    seats = gather_objects(_Seat(machine, place.local_rank, place.local_world_size), _whole_group())
    mine = seats[place.rank]
    across = [rank for rank, seat in enumerate(seats) if seat.local_rank == mine.local_rank]
    variables = {
        "HOROVOD_RANK": place.rank,
        "HOROVOD_SIZE": len(seats),
        "HOROVOD_LOCAL_RANK": mine.local_rank,
        "HOROVOD_LOCAL_SIZE": mine.local_size,
        "HOROVOD_CROSS_RANK": across.index(place.rank),
        "HOROVOD_CROSS_SIZE": len(across),
        "HOROVOD_HOSTNAME": mine.machine,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if rendezvous is not None:
        endpoint = _open_store(seats, rendezvous) if place.rank == 0 else ("", 0)
        host, port = gather_objects(endpoint, _whole_group())[0]
        interface = find_socket_interface(rendezvous)
        variables |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
        variables |= {} if interface is None else {"HOROVOD_GLOO_IFACE": interface}
    return {name: str(value) for name, value in variables.items()}


def _open_store(seats: list[_Seat], rendezvous: Rendezvous) -> tuple[str, int]:
    """Run Horovod's store on rank 0, at the address that the other ranks reach, until this process ends."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    address = rendezvous.own_address or rendezvous.address
    if is_loopback(address) and not rendezvous.is_local:
        raise LaunchError(
            f"MASTER_ADDR={address} on rank 0 is not an address that other machines reach, and engine=horovod has to "
            "listen there; set MASTER_ADDR to the address of rank 0's machine on every rank."
        )
    store = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    sizes = [sum(other.local_rank == seat.local_rank for other in seats) for seat in seats]
    store.init(
        [
            SlotInfo(seat.machine, rank, seat.local_rank, 0, len(seats), seat.local_size, cross_size)
            for rank, (seat, cross_size) in enumerate(zip(seats, sizes, strict=True))
        ]
    )
    threading.Thread(target=store.serve_forever, name="horovod store", daemon=True).start()
    return address, store.server_address[1]


def _whole_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class _Sent(NamedTuple):
    """A group on its way: the gradients, the tensors that Horovod sums in their place, and its handle."""

    gradients: Sequence[Tensor]
    summed: Sequence[Tensor]
    handle: int


class GroupSums:
    """Sums gradients over Horovod's ranks in fixed groups; a group is sent when its last gradient is there.

    Groups have names, so they may be ready in another order on another rank. Hooks of parameters hold this object, so
    it refers to no parameter: such a cycle would never be freed.
    """

    def __init__(self, hvd: Any, groups: Sequence[Sequence[str]], in_fp16: bool) -> None:
        """`hvd`: `horovod.torch`. `groups`: names of parameters. `in_fp16`: whether gradients are sent in fp16."""
        self._hvd = hvd
        self._groups = groups
        self._group_of = {name: index for index, group in enumerate(groups) for name in group}
        self._dtype = torch.float16 if in_fp16 else torch.float32
        self._ready: dict[str, Tensor] = {}
        self._sent: dict[int, _Sent] = {}
        self._meter, self._share = count_traffic(), 2 * (1 - 1 / hvd.size())  # of what is summed, in a ring
        self.takes = False
        """Whether gradients are complete as they become ready: in the last microbatch of a step."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a parameter; send its group if it was the last one."""
        self._ready[name] = gradient
        index = self._group_of[name]
        if all(group in self._ready for group in self._groups[index]):
            self._send(index)

    def is_sent(self, name: str) -> bool:
        """Whether the group of a parameter is on its way."""
        return self._group_of[name] in self._sent

    @torch.no_grad()
    def _send(self, index: int) -> None:
        gradients = [self._ready.pop(name) for name in self._groups[index]]
        summed = [
            gradient.to(self._dtype).contiguous() for gradient in gradients
        ]  # the same tensor if it is so already
        self._meter.add(CollectiveKind("horovod", "all_reduce"), self._share * sum(tensor.nbytes for tensor in summed))
        handle = self._hvd.grouped_allreduce_async_(summed, name=f"gradients {index}", op=self._hvd.Sum)
        self._sent[index] = _Sent(gradients, summed, handle)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for every group that was sent, and put the sums in place of the gradients."""
        for sent in self._sent.values():
            self._hvd.synchronize(sent.handle)
            for gradient, summed in zip(sent.gradients, sent.summed, strict=True):
                if summed is not gradient:
                    gradient.copy_(summed)
        self._sent.clear()


class HorovodSum(Isolatable, Alone):
    """A whole copy of the model on every rank; sums overlap the last backward pass of a step."""

    def __init__(self, module: nn.Module, autocast: Autocast, hvd: Any, group_bytes: int, in_fp16: bool) -> None:
        """`group_bytes`: of the gradients that are summed at once. See `GroupSums` for the others."""
        super().__init__(module, autocast)
        self._trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        # Backward passes begin with the last layer, so its gradients are ready first.
        sizes = {
            name: parameter.numel() * parameter.element_size() for name, parameter in reversed(self._trained.items())
        }
        self._sums = GroupSums(hvd, divide(sizes, group_bytes), in_fp16)
        for name, parameter in self._trained.items():
            register: Any = parameter.register_post_accumulate_grad_hook  # without annotations
            register(_Hook(self._sums, name))

    @contextmanager
    @override
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Gradients stay on this rank until the last microbatch."""
        self._sums.takes = is_last and self._sends
        with super().microbatch(is_last):
            yield

    @override
    def reduce(self) -> None:
        """Send the groups with parameters that the last microbatch did not use, and wait for all. Collective."""
        if not self._sums.takes:
            return
        self._sums.takes = False
        for name, parameter in self._trained.items():
            if not self._sums.is_sent(name):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._sums.add(name, parameter.grad)
        self._sums.finish()


class _Hook:
    """Called when the gradient of a parameter has been added up."""

    def __init__(self, sums: GroupSums, name: str) -> None:
        self._sums, self._name = sums, name

    def __call__(self, parameter: Tensor) -> None:
        if self._sums.takes:
            assert parameter.grad is not None
            self._sums.add(self._name, parameter.grad)


def divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names in groups of at most `limit` bytes, in their order; a larger one is a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups
