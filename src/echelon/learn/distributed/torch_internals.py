"""The private parts of torch.distributed's groups that are used here, each with the reason."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import Store  # type: ignore[attr-defined]

_UNUSED_TAG = 3


def add_backend(group: dist.ProcessGroup, device: torch.device, backend: Any, is_default: bool = False) -> None:
    """Have a group use a backend for tensors of a device: torch forms groups only of ranks of its default group."""
    kind = dist.ProcessGroup.BackendType.NCCL if backend.name() == "nccl" else dist.ProcessGroup.BackendType.GLOO
    group._register_backend(device, kind, backend)
    if is_default:
        group._set_default_backend(kind)


def enlist(group: dist.ProcessGroup, ranks: Mapping[int, int], store: Store) -> None:
    """Make torch's functions accept a group that it did not form. `ranks`: its ranks by those of the default group."""
    c10d._world.pg_group_ranks[group] = dict(ranks)
    c10d._world.pg_map[group] = ("gloo", store)


def strike_off(group: dist.ProcessGroup) -> None:
    """Drop what torch knows of a group that was enlisted."""
    for table in (c10d._world.pg_group_ranks, c10d._world.pg_map):
        table.pop(group, None)


def list_groups() -> list[dist.ProcessGroup]:
    """All groups of this process: an operation of any of them may wait for a lost rank."""
    return list(c10d._world.pg_map)


def name_groups() -> dict[dist.ProcessGroup, str]:
    """All groups with torch's names of them, under which its flight recorder lists what they did."""
    return dict(c10d._world.pg_names)


def count_groups_anew() -> None:
    """Count groups from 0: the ranks of one find each other by its number, which counts one that was not formed too."""
    c10d._world.group_count = 0


def find_backends(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, one for each kind of device."""
    return [group._get_backend(device) for device in group._device_types]


def set_timeout(backend: Any, seconds: float) -> None:
    """Set the timeout of operations: the one that a group is formed with is also that of the connection."""
    backend._set_default_timeout(timedelta(seconds=seconds))


def close_connections(group: dist.ProcessGroup) -> None:
    """End all waits for messages of a group, in all threads of this process and of the others. Not collective.

    torch cannot end a wait of another thread. gloo closes all connections of a group when one wait runs out of time.
    """
    if group.size() > 1:
        with suppress(RuntimeError):
            group.recv_anysource([torch.empty(1)], _UNUSED_TAG).wait(timedelta(milliseconds=1))
