"""Checkpoint names of tensors that differ between replicas, or between ranks.

A checkpoint stores one value per name, whichever rank wrote it. So tensors that differ between replicas get the
replica's index as a prefix. Tensors that all replicas share keep their plain names, which export and evaluation use.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

_NAME = re.compile(r"replica-(\d+)\.(.+)", re.DOTALL)
_RANK = re.compile(r"rank-(\d+)\.")


def replica_name(replica: int, name: str) -> str:
    """Return the name of a replica's own tensor, for example `replica-0003.model.X`."""
    return f"replica-{replica:04d}.{name}"


def split_replica_name(name: str) -> tuple[int | None, str]:
    """Split a name into the replica that the tensor belongs to, None if shared, and its plain name."""
    match = _NAME.fullmatch(name)
    return (None, name) if match is None else (int(match[1]), match[2])


def count_replicas(saved: Iterable[str]) -> int:
    """Count the replicas with their own tensors among the names in a checkpoint."""
    return len({replica for replica, _ in map(split_replica_name, saved) if replica is not None})


def rank_name(rank: int, name: str) -> str:
    """Return the name of a rank's own tensor, for example `rank-0003.residual.X`; it has no meaning for other ranks."""
    return f"rank-{rank:04d}.{name}"


def find_ranks(names: Iterable[str]) -> set[int]:
    """Return the ranks with their own tensors among these names."""
    return {int(match[1]) for match in map(_RANK.match, names) if match is not None}


def match_replicas(wanted: Mapping[str, T], saved: Iterable[str]) -> dict[str, T]:
    """Map the wanted tensors to the names they were saved under.

    If the number of replicas differs, replica k reads the tensors of replica k modulo the saved number.
    """
    count = count_replicas(saved)
    matched = {}
    for name, value in wanted.items():
        replica, plain = split_replica_name(name)
        matched[name if replica is None or not count else replica_name(replica % count, plain)] = value
    return matched
