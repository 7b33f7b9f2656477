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
    result: T | EchelonError
    try:
        result = find()
    except EchelonError as error:
        result = error
    results: list[T] = []
    for value in gather_objects(result, group):
        if isinstance(value, EchelonError):
            raise value
        results.append(value)
    return results


def broadcast_object(value: T, group: dist.ProcessGroup | None, source: int = 0) -> T:
    """Return on every rank the value that rank `source` of a group gives; those of others are ignored.

    Collective over `group`; None: over all ranks.
    """
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    received: T = values[0]
    return received


def agree(find: Callable[[], T]) -> T:
    """Return what rank 0 finds, on every rank. Collective. Raises its error on every rank, if it is echelon's."""
    result: Any = None
    if dist.get_rank() == 0:
        try:
            result = find()
        except EchelonError as error:
            result = error
    result = broadcast_object(result, None)
    if isinstance(result, EchelonError):
        raise result
    agreed: T = result
    return agreed
