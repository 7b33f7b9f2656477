"""This process among its peers: its process group and its device.

torch is imported inside the functions: the watchdog is needed before it is loaded.
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
# How long a rank waits for its peers in a collective before it counts them as lost. A peer's death is noticed at once,
# and a hang in training by the heartbeat; this is for one before or between steps, and longer than either may differ.
COLLECTIVE_SECONDS = 900.0
_GRACE_SECONDS = 5.0
_WATCHDOG_SECONDS = 0.5


@dataclass(frozen=True)
class Runtime:
    """This process's place: `rank` of `world_size` everywhere, `local_rank` of `local_world_size` on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: "torch.device"
    backend: str


def use_deterministic_algorithms() -> None:
    """Let this process compute with operations alone whose results repeat bit for bit; any other one raises.

    Call it before anything ran on a GPU: cuBLAS reads its setting once.
    """
    import torch

    set_variables(CUBLAS_WORKSPACES)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def default_num_processes() -> int:
    """One process per GPU, or one per two CPU cores and at least one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, num_cores() // 2)


def start_watchdog(parent: int | None = None) -> None:
    """End this worker as soon as the process that started it is gone, even if that was killed by SIGKILL.

    `parent` is that process; by default what the agent said, or else the parent of now.
    """
    expected = find_agent_pid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(_WATCHDOG_SECONDS)
        if (place := find_snapshot_dir()) is not None:  # nobody else can give the memory back any more
            shutil.rmtree(place, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def open_store(timeout_seconds: float = RENDEZVOUS_SECONDS) -> "Store":
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT, where rank 0 (or torchrun's agent) keeps a key-value store.

    Collective: every rank calls it. Raises LaunchError when the port is taken or nobody answers in time.
    A single process gets a store of its own.
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
    """Where rank 0's store listens: where the others look for it, instead of on every interface.

    None: torch decides. So it is under a launcher whose MASTER_ADDR is not this machine's own address, or loopback and
    not known to be of one machine, as operators of Kubernetes set it for rank 0. Raises OSError when the port is taken.
    """
    own = meeting.own_address
    with suppress(socket.gaierror, OverflowError):  # torch tries the name again, and explains a wrong port
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
    """Join the process group: NCCL with one GPU per process, else gloo on the CPU; one process is a group of one.

    Collective: every rank calls it. `timeout_seconds` is how long a collective may wait for its peers; `store` is
    what `open_store()` gave, opened here when absent.
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
            f"rank {place.rank} met its peers but could not connect to them: {error}; "
            "choose the network interface with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
        ) from error
    logger.debug(f"process group: rank {place.rank} of {place.world_size}, {backend} on {device}")
    return Runtime(place.rank, place.world_size, place.local_rank, place.local_world_size, device, backend)


def _choose_device(place: Place) -> "tuple[torch.device, str]":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    visible = torch.cuda.device_count()
    # Some launchers show each process its own GPU alone.
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
    """Leave the process group. After a failure nothing is awaited: the process's end closes its connections."""
    import torch.distributed as dist

    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
