"""The process group of a rank, from the variables of its launcher.

torch is imported inside the functions, because a worker watches its parent before torch is loaded.
"""

import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from echelon.ground.cores import num_cores
from echelon.ground.errors import LaunchError
from echelon.ground.launch_environment import (
    Rendezvous,
    find_agent_pid,
    find_place,
    find_rendezvous,
    find_terminal_rank,
    is_gpu_private,
    shares_agent_store,
)
from echelon.ground.open_files import allow_open_files
from echelon.ground.sockets import listen_at, within
from echelon.ground.stop_request import start_watchdog
from echelon.ground.variables import Place
from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS, Runtime, form_group

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

RENDEZVOUS_SECONDS = 120.0
_GRACE_SECONDS = 5.0
# If a person may stop a rank in a debugger; torch accepts no infinite timeout.
_ATTENDED_SECONDS = 30 * 86400.0


def default_num_processes() -> int:
    """Return one process per GPU, or without GPUs one per two CPU cores, at least one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, num_cores() // 2)


def watch_starter() -> None:
    """End this worker when the process that it must not outlive is gone, which its agent has named or is its parent."""
    start_watchdog(find_agent_pid())


def open_store(timeout_seconds: float = RENDEZVOUS_SECONDS) -> "Store":
    """Join the other ranks at MASTER_ADDR:MASTER_PORT, where their agent, or else rank 0, runs a key-value store.

    Collective: every rank calls it. Raises LaunchError if the port is in use or the ranks do not meet in time.
    A single process gets a local store.
    """
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    rendezvous = find_rendezvous()
    if rendezvous is None:
        return HashStore()
    place = find_place()
    try:
        listener = _open_listener(rendezvous) if place.rank == 0 and not shares_agent_store() else None
        return within(timeout_seconds + _GRACE_SECONDS, lambda: _join_store(place, timeout_seconds, listener))
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise _explain_rendezvous(error, place, rendezvous, timeout_seconds) from error


def _join_store(place: Place, timeout_seconds: float, listener: socket.socket | None) -> "Store":
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_seconds)
    if listener is None:
        url = f"env://?rank={place.rank}&world_size={place.world_size}"
        return cast("Store", next(iter(rendezvous(url, timeout=timeout)))[0])
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, place.world_size, True, timeout, master_listen_fd=listener.detach())


def _open_listener(rendezvous: Rendezvous) -> socket.socket | None:
    """Open rank 0's listening socket on the address that the other ranks connect to, instead of all interfaces.

    None leaves it to torch: MASTER_ADDR is not an address of this machine, or it is loopback although the job may have
    several machines, as operators of Kubernetes set it for rank 0. Raises OSError if the port is in use.
    """
    with suppress(socket.gaierror, OverflowError):  # torch resolves the name again, and reports an invalid port
        return listen_at(rendezvous.address, int(rendezvous.port), rendezvous.is_local)
    return None


def _explain_rendezvous(error: Exception, place: Place, rendezvous: Rendezvous, timeout_seconds: float) -> LaunchError:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return LaunchError(
            f"rank {place.rank} cannot listen on {rendezvous}: the port is in use by another program; "
            "set MASTER_PORT to a free port, the same for every rank."
        )
    if isinstance(error, ValueError):
        return LaunchError(f"MASTER_ADDR:MASTER_PORT is {rendezvous}, which is not a valid address: {text}.")
    return LaunchError(
        f"rank {place.rank} did not meet all {place.world_size} processes at {rendezvous} within "
        f"{timeout_seconds:.0f} seconds; check that every rank was started, that MASTER_ADDR names rank 0's machine, "
        "and that MASTER_PORT is the same everywhere and not blocked."
    )


def start_runtime(timeout_seconds: float = COLLECTIVE_SECONDS, store: "Store | None" = None) -> Runtime:
    """Join the process group of this rank's job: see `form_group`. A single process forms its own.

    Collective: every rank calls it. `timeout_seconds` is the timeout of collectives; `store` is the result of
    `open_store()`, called here if absent.
    """
    allow_open_files(find_place().world_size)
    if find_terminal_rank() is not None:
        timeout_seconds = _ATTENDED_SECONDS
        _raise_default_timeouts(timeout_seconds)
    return form_group(find_place(), open_store() if store is None else store, timeout_seconds, is_gpu_private())


def _raise_default_timeouts(seconds: float) -> None:
    """Set the timeout of the groups of a mesh, for which torch has no argument."""
    from torch.distributed import distributed_c10d as c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(c10d, name, timedelta(seconds=seconds))
