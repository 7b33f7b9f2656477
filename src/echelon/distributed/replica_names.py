"""Names of tensors that replicas hold differently.

A checkpoint keeps one value for each name, whichever rank it came from. So what differs between replicas is saved under
a name with the replica's index in front; what they have agreed on keeps its plain name, which is all that export and
evaluation look for.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

_NAME = re.compile(r"replica-(\d+)\.(.+)", re.DOTALL)


def replica_name(replica: int, name: str) -> str:
    """The name of one replica's own tensor, `replica-0003.model.X` for example."""
    return f"replica-{replica:04d}.{name}"


def split_replica_name(name: str) -> tuple[int | None, str]:
    """The replica that a tensor belongs to and its plain name; None for one that all of them share."""
    match = _NAME.fullmatch(name)
    return (None, name) if match is None else (int(match[1]), match[2])


def count_replicas(saved: Iterable[str]) -> int:
    """How many replicas have tensors of their own among the names that a checkpoint holds."""
    return len({replica for replica, _ in map(split_replica_name, saved) if replica is not None})


def match_replicas(wanted: Mapping[str, T], saved: Iterable[str]) -> dict[str, T]:
    """What is to be read, under the names it was saved by.

    Of another number of replicas, replica k reads what replica k modulo that number has saved.
    """
    count = count_replicas(saved)
    matched = {}
    for name, value in wanted.items():
        replica, plain = split_replica_name(name)
        matched[name if replica is None or not count else replica_name(replica % count, plain)] = value
    return matched
