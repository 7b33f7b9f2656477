"""Objects of one rank for all of a group. They are pickled, and come from ranks of the same job alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from echelon.ground.errors import EchelonError

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the value of each rank of a group, by rank. Collective over `group`; None: over all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_found(find: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Return what each rank of a group finds, by rank. Collective over `group`; None: over all ranks.

    Raises the first error of a rank on every rank, if it is echelon's.
    """
    own: T | EchelonError
    try:
        own = find()
    except EchelonError as error:
        own = error
    found: list[T] = []
    for value in gather_objects(own, group):
        if isinstance(value, EchelonError):
            raise value
        found.append(value)
    return found


def broadcast_object(value: T, group: dist.ProcessGroup | None, source: int = 0) -> T:
    """Return on every rank the value that rank `source` of a group gives; those of others are ignored.

    Collective over `group`; None: over all ranks.
    """
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    found: T = values[0]
    return found


def agree(find: Callable[[], T]) -> T:
    """Return what rank 0 finds, on every rank. Collective. Raises its error on every rank, if it is echelon's."""
    found: Any = None
    if dist.get_rank() == 0:
        try:
            found = find()
        except EchelonError as error:
            found = error
    found = broadcast_object(found, None)
    if isinstance(found, EchelonError):
        raise found
    agreed: T = found
    return agreed
