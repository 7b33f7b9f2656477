"""The process group of a rank and its device.

torch is imported inside the functions, because a worker watches its parent before torch is loaded.
"""

import atexit
import logging
import platform
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from echelon.ground.cores import num_cores
from echelon.ground.errors import LaunchError
from echelon.ground.variables import CUBLAS_WORKSPACES, Place, find_torchrun_place, is_thread_count_set, set_variables

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

# Timeout of collectives. The death of a peer is noticed at once, and a hang in training by the heartbeat. This timeout
# covers hangs before or between steps, and is longer than one rank may have to wait for another there.
COLLECTIVE_SECONDS = 900.0


@dataclass(frozen=True)
class Runtime(Place):
    """The ranks of this process in its process group."""

    device: "torch.device"
    backend: str


def use_deterministic_algorithms() -> None:
    """Allow only deterministic operations in this process; any other raises an error.

    Must be called before any GPU operation: cuBLAS reads its setting once.
    """
    import torch

    set_variables(CUBLAS_WORKSPACES)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def join_group() -> Runtime:
    """Join the ranks of this job: the existing process group, else torchrun's, else a group of this process alone.

    Collective: every rank calls it. Raises LaunchError as `form_group` does.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    place = find_torchrun_place()
    if dist.is_initialized():
        place = place or _find_place_in_group()
        device = choose_device(place, sees_own_gpu=False) if dist.get_backend() == "nccl" else torch.device("cpu")
        return Runtime(
            dist.get_rank(), dist.get_world_size(), place.local_rank, place.local_world_size, device, dist.get_backend()
        )
    # torch cannot form a group twice in a process, so the group stays until the process ends.
    atexit.register(stop_runtime)
    return form_group(Place(0, 1, 0, 1), HashStore()) if place is None else form_group(place, None)


def form_group(
    place: Place, store: "Store | None", timeout_seconds: float = COLLECTIVE_SECONDS, sees_own_gpu: bool = False
) -> Runtime:
    """Form the process group: NCCL with one GPU per process, else gloo on the CPU.

    Collective: every rank calls it. A process does this once: caches of DTensor keep the meshes of a group that was
    destroyed.

    Args:
        store: where the ranks meet; None: at MASTER_ADDR:MASTER_PORT, which torch reads.
        timeout_seconds: the timeout of collectives.
        sees_own_gpu: whether the launcher may show each process its own GPU alone.

    Raises:
        LaunchError: this rank has no GPU of its own, or cannot connect to the others.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    device = choose_device(place, sees_own_gpu)
    if device.type == "cpu" and not is_thread_count_set():
        torch.set_num_threads(max(1, num_cores() // place.local_world_size))
    backend = "gloo" if device.type == "cpu" else "nccl"
    try:
        dist.init_process_group(
            backend,
            store=None if store is None else PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        raise LaunchError(
            f"rank {place.rank} reached the store, but could not connect to the other ranks: {error}; "
            "choose the network interface with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
        ) from error
    logger.debug(f"process group: rank {place.rank} of {place.world_size}, {backend} on {device}")
    return Runtime(place.rank, place.world_size, place.local_rank, place.local_world_size, device, backend)


def choose_device(place: Place, sees_own_gpu: bool) -> "torch.device":
    """This rank's own GPU, from now on the current one, or else the CPU. Raises LaunchError if it has no GPU alone."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 and place.local_world_size > 1 and sees_own_gpu else place.local_rank
    if index >= visible:
        raise LaunchError(
            f"local rank {place.local_rank} has no GPU of its own: {visible} visible for "
            f"{place.local_world_size} processes; start at most one process per GPU."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _find_place_in_group() -> Place:
    """The place of this rank in the existing group, by the names of the machines. Collective."""
    import torch.distributed as dist

    from echelon.learn.distributed.objects import gather_objects

    rank, machines = dist.get_rank(), gather_objects(platform.node(), None)
    machine_ranks = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    return Place(rank, len(machines), machine_ranks.index(rank), len(machine_ranks))


def leave_groups() -> None:
    """Destroy all process groups, and what would keep their connections: caches of DTensor, and cycles of objects.

    A group of gloo that is kept has a thread that wakes up more than a hundred times a second. Not collective. The
    caller must have dropped what it built in the groups.
    """
    import gc

    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()


def stop_runtime(failed: bool = False) -> None:
    """Destroy the process group. After a failure do not wait for it: the end of the process closes the connections."""
    import torch.distributed as dist

    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
