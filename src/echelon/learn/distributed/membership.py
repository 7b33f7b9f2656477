"""Replicas that may be lost and join while the others train: what a step needs of their agreement."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

_UNUSED_TAG = 3


class ViewChanged(Exception):
    """The replicas must form a new group: one was lost, or waits to join. The run goes on with what this one holds."""


class Membership(Protocol):
    """This rank's part in a view: the replicas that train together until one of them is lost or another joins."""

    num_replicas: int
    """Those of a view in which none is lost."""
    num_essential: int
    """How many replicas, the first ones, have state that no other has; they are in every view."""

    @property
    def number(self) -> int:
        """That of the view, from 0."""

    def new_group(self, purpose: str = "checkpoints") -> dist.ProcessGroup:
        """Form another group of all ranks of the view. Collective. An error of one rank is one of its replica's."""

    def begin_step(self) -> None:
        """Begin a step that ends in `agree`: an all-reduce between that fails raises its error there. Collective."""

    def sees_next(self) -> bool:
        """Whether another view is to follow this one. The first rank looks; false on all others."""

    def agree(self, values: torch.Tensor) -> torch.Tensor:
        """Return the last sum of a step over all ranks, if a rank of this replica has it. Collective over the replica.

        Raises the error of the step's first all-reduce that failed, if none has. `values`: fp64, [values], of which the
        first is that of `sees_next`; anything where an all-reduce of the step failed on this rank.
        """

    def vote(self) -> None:
        """Wait until all ranks, whose states differ, have voted. Collective. Raises ViewChanged if one is lost."""

    def check(self) -> None:
        """Raise ViewChanged if the last step found that the view ends. The same on every replica of the view."""

    def is_ending(self) -> bool:
        """Whether this view is over, or another one is to follow it."""

    def raise_change(self, error: BaseException) -> None:
        """Raise ViewChanged if an error comes from the end of this view."""

    def at_end(self, stop: Callable[[], None]) -> None:
        """Have this called before the group is left: it stops threads that use groups of the view."""


def close_connections(group: dist.ProcessGroup) -> None:
    """End all waits for messages of a group, in all threads of this process and of the others. Not collective.

    torch cannot end a wait of another thread. gloo closes all connections of a group when one wait runs out of time.
    """
    if group.size() > 1:
        with suppress(RuntimeError):
            group.recv_anysource([torch.empty(1)], _UNUSED_TAG).wait(timedelta(milliseconds=1))
