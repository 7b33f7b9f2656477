"""The engine `horovod`: starts Horovod over the ranks of the process group, and builds the native engine, whose
gradients Horovod sums."""

import importlib
import platform
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

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
from echelon.learn.engines.engine import EngineSpec
from echelon.learn.engines.native import NativeEngine
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.data_parallel import autocast_scope
from echelon.learn.parallel.horovod_sum import HorovodSum
from echelon.learn.parallel.protocol import DataParallel
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
