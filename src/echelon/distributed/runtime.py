"""The runtime of a worker: its process group, its device, and a watchdog on its parent.

torch is imported inside the functions, because the watchdog must start before torch is loaded.
"""

import logging
import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from echelon.errors import LaunchError
from echelon.hardware.cores import num_cores
from echelon.supervise.launch_environment import (
    CUBLAS_WORKSPACES,
    Place,
    Rendezvous,
    find_agent_pid,
    find_place,
    find_rendezvous,
    find_snapshot_dir,
    is_gpu_private,
    is_thread_count_set,
    set_variables,
    shares_agent_store,
)
from echelon.supervise.listening import listen_at, within

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

RENDEZVOUS_SECONDS = 120.0
# Timeout of collectives. The death of a peer is noticed at once, and a hang in training by the heartbeat. This timeout
# covers hangs before or between steps, and is longer than one rank may have to wait for another there.
COLLECTIVE_SECONDS = 900.0
_GRACE_SECONDS = 5.0
_WATCHDOG_SECONDS = 0.5


@dataclass(frozen=True)
class Runtime:
    """The ranks of this process: `rank` of `world_size` globally, `local_rank` of `local_world_size` on the machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
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


def default_num_processes() -> int:
    """Return one process per GPU, or without GPUs one per two CPU cores, at least one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, num_cores() // 2)


def start_watchdog(parent: int | None = None) -> None:
    """End this worker when the process that started it is gone, even if it was killed by SIGKILL.

    `parent`: pid of that process; by default the one that the agent gave, else the current parent.
    """
    expected = find_agent_pid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(_WATCHDOG_SECONDS)
        if (place := find_snapshot_dir()) is not None:  # the parent can no longer free this memory
            while place.exists():  # a snapshot that is being written can add to it meanwhile
                shutil.rmtree(place, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def open_store(timeout_seconds: float = RENDEZVOUS_SECONDS) -> "Store":
    """Join the other ranks at MASTER_ADDR:MASTER_PORT, where rank 0 (or torchrun's agent) runs a key-value store.

    Collective: every rank calls it. Raises LaunchError if the port is in use or the ranks do not meet in time.
    A single process gets a local store.
    """
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    meeting = find_rendezvous()
    if meeting is None:
        return HashStore()
    place = find_place()
    try:
        listener = _open_listener(meeting) if place.rank == 0 and not shares_agent_store() else None
        return within(timeout_seconds + _GRACE_SECONDS, lambda: _join_store(place, timeout_seconds, listener))
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise _explain_rendezvous(error, place, meeting, timeout_seconds) from error


def _join_store(place: Place, timeout_seconds: float, listener: socket.socket | None) -> "Store":
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_seconds)
    if listener is None:
        url = f"env://?rank={place.rank}&world_size={place.world_size}"
        return cast("Store", next(iter(rendezvous(url, timeout=timeout)))[0])
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, place.world_size, True, timeout, master_listen_fd=listener.detach())


def _open_listener(meeting: Rendezvous) -> socket.socket | None:
    """Open rank 0's listening socket on the address that the other ranks connect to, instead of all interfaces.

    None leaves it to torch: MASTER_ADDR is not an address of this machine, or it is loopback although the job may have
    several machines, as operators of Kubernetes set it for rank 0. Raises OSError if the port is in use.
    """
    own = meeting.own_address
    with suppress(socket.gaierror, OverflowError):  # torch resolves the name again, and reports an invalid port
        return listen_at(own or meeting.address, int(meeting.port), meeting.is_local or own is not None)
    return None


def _explain_rendezvous(error: Exception, place: Place, meeting: Rendezvous, timeout_seconds: float) -> LaunchError:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return LaunchError(
            f"rank {place.rank} cannot listen on {meeting}: the port is in use by another program; "
            "set MASTER_PORT to a free port, the same for every rank."
        )
    if isinstance(error, ValueError):
        return LaunchError(f"MASTER_ADDR:MASTER_PORT is {meeting}, which is not a valid address: {text}.")
    return LaunchError(
        f"rank {place.rank} did not meet all {place.world_size} processes at {meeting} within "
        f"{timeout_seconds:.0f} seconds; check that every rank was started, that MASTER_ADDR names rank 0's machine, "
        "and that MASTER_PORT is the same everywhere and not blocked."
    )


def start_runtime(timeout_seconds: float = COLLECTIVE_SECONDS, store: "Store | None" = None) -> Runtime:
    """Join the process group: NCCL with one GPU per process, else gloo on the CPU. A single process forms its own.

    Collective: every rank calls it. `timeout_seconds` is the timeout of collectives; `store` is the result of
    `open_store()`, called here if absent.

    A process does this once: it is started or forked anew for every attempt of a run, and caches of DTensor keep the
    meshes of a group that was destroyed.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    place = find_place()
    device, backend = _choose_device(place)
    if device.type == "cpu" and not is_thread_count_set():
        torch.set_num_threads(max(1, num_cores() // place.local_world_size))
    store = open_store() if store is None else store
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
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


def _choose_device(place: Place) -> "tuple[torch.device, str]":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    visible = torch.cuda.device_count()
    # Some launchers make only one GPU visible to each process.
    index = 0 if visible == 1 and place.local_world_size > 1 and is_gpu_private() else place.local_rank
    if index >= visible:
        raise LaunchError(
            f"local rank {place.local_rank} has no GPU of its own: {visible} visible for "
            f"{place.local_world_size} processes; start at most one process per GPU."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device, "nccl"


def stop_runtime(failed: bool = False) -> None:
    """Destroy the process group. After a failure do not wait for it: the end of the process closes the connections."""
    import torch.distributed as dist

    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
