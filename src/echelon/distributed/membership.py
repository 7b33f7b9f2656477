"""The group of a quorum: the process group of a view, which ends when a replica is lost or joins."""

import gc
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from echelon.distributed.runtime import COLLECTIVE_SECONDS
from echelon.errors import LaunchError
from echelon.supervise.board import Board, Change, View, await_true
from echelon.supervise.launch_environment import find_rendezvous
from echelon.supervise.outcome import is_secondary

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_BACKEND = "gloo"
_RECORDED = "recorded"
_STORE_SECONDS = 60.0
# How long the keeper may take to notice a death that a replica has met as an error.
_NOTICE_SECONDS, _SHORT_NOTICE_SECONDS = 5.0, 2.0


class ViewChanged(Exception):
    """The replicas must form a new group: one was lost, or waits to join. The run goes on with what this one holds."""


@dataclass
class Membership:
    """This replica's part in a view."""

    board: Board
    view: View
    member: str
    _num_ballots: int = 0
    _is_changing: bool = field(default=False)

    @property
    def rank(self) -> int:
        """This replica's rank in the view."""
        return self.view.members.index(self.member)

    def vote(self) -> None:
        """Vote for a step, and wait until all replicas of the view have. Collective.

        Raises ViewChanged if one of them is lost before: no replica may apply the step.
        """
        ballot, self._num_ballots = self._num_ballots, self._num_ballots + 1
        is_changing = self.board.vote(self.view, ballot)
        if is_changing is None:
            raise ViewChanged
        self._is_changing = is_changing

    def check(self) -> None:
        """Raise ViewChanged if the last vote found that the view ends. The same on every replica of the view."""
        if self._is_changing:
            raise ViewChanged

    def raise_change(self, error: BaseException) -> None:
        """Raise ViewChanged if an error comes from the end of this view.

        Waits a moment for the keeper to notice a death, longer if the error looks like one.
        """
        if isinstance(error, ViewChanged):
            raise error
        seconds = _NOTICE_SECONDS if is_secondary(error) else _SHORT_NOTICE_SECONDS
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return
        if await_true(lambda: self.board.has_changed(self.view.number), seconds):
            raise ViewChanged from error

    def find_changes(self) -> list[Change]:
        """The replicas that were lost and have joined, up to this view, in changes that nobody has recorded."""
        first = self.view.number
        while first > 0 and not self.board.is_marked(_RECORDED, str(first - 1)):
            first -= 1
        return [change for number in range(first, self.view.number + 1) for change in self.board.read(number).changes]

    def tell_recorded(self) -> None:
        """Say that the changes up to this view are recorded."""
        self.board.mark(_RECORDED, str(self.view.number))


def join_board() -> tuple[Board, "Store"]:
    """The keeper's board, and the store that it is in. Raises LaunchError if the keeper cannot be reached."""
    place = find_rendezvous()
    assert place is not None
    try:
        store = TCPStore(place.address, int(place.port), None, False, timedelta(seconds=_STORE_SECONDS))
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(f"the process that keeps the replicas is not at {place}: {error}") from error
    return Board(store), cast("Store", store)


def form_alone() -> None:
    """Form a process group of this process alone."""
    _form(HashStore(), 0, 1)


def form_group(store: "Store", membership: Membership) -> None:
    """Form the process group of a view. Collective: all of its replicas call it."""
    view = membership.view
    _form(PrefixStore(f"group/{view.number}", store), membership.rank, len(view.members))


def leave_group() -> None:
    """End the process group without waiting for any peer: those that still wait for this one get an error.

    gloo closes its connections once nothing refers to its groups, so the caller must have dropped what it built in
    them. (torch's `abort` does not close them.)
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _form(store: "Store", rank: int, size: int) -> None:
    dist.init_process_group(
        _BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_SECONDS)
    )
