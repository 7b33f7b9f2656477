"""The process group of a view: replicas that train together until one of them is lost or another one joins."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout
from typing_extensions import override

from echelon.ground.errors import LaunchError
from echelon.ground.launch_environment import find_rendezvous
from echelon.learn.distributed.membership import Membership, ViewChanged, close_connections
from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS
from echelon.run.supervise.board import Board, Change, View, await_true
from echelon.run.supervise.outcome import is_secondary

_BACKEND = "gloo"
_RECORDED = "recorded"
_STORE_SECONDS = 60.0
# A fifth of the time that gloo waits for a connection once all replicas have published their addresses.
CONNECT_SECONDS = 4.0
_LOOK_SECONDS = 0.002
# How long the keeper may take to notice a death that a replica has met as an error.
_NOTICE_SECONDS, _SHORT_NOTICE_SECONDS = 5.0, 2.0


@dataclass
class ViewMembership(Membership):
    """Replicas that agree on the keeper's board."""

    board: Board
    view: View
    member: str
    """The name of this start of the replica."""
    num_replicas: int
    num_essential: int = 0
    _num_ballots: int = 0
    _is_changing: bool = field(default=False)
    _store: Store | None = None
    _groups: list[dist.ProcessGroup] = field(default_factory=list)
    _endings: list[Callable[[], None]] = field(default_factory=list)

    @property
    @override
    def number(self) -> int:
        return self.view.number

    @property
    def rank(self) -> int:
        """This replica's rank in the view."""
        return self.view.members.index(self.member)

    def form_group(self, store: Store) -> None:
        """Form the default process group of the view. Collective: all of its replicas call it.

        Raises ViewChanged if one of them is lost before it has published its address.
        """
        number = self.view.number
        # torch does not refer to a store that is a Python object.
        self._store = ViewStore(PrefixStore(f"group/{number}", store), lambda: self.board.is_over(number))
        _form(self._store, self.rank, len(self.view.members), CONNECT_SECONDS)
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_SECONDS))
        self._groups.append(cast(dist.ProcessGroup, dist.group.WORLD))

    @override
    def new_group(self, purpose: str = "checkpoints") -> dist.ProcessGroup:
        timeout = timedelta(seconds=CONNECT_SECONDS)
        group = cast(dist.ProcessGroup, dist.new_group(backend=_BACKEND, timeout=timeout, group_desc=purpose))
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_SECONDS), group)
        self._groups.append(group)
        return group

    @override
    def vote(self) -> None:
        ballot, self._num_ballots = self._num_ballots, self._num_ballots + 1
        is_changing = self.board.vote(self.view, ballot)
        if is_changing is None:
            raise ViewChanged
        self._is_changing = is_changing

    @override
    def check(self) -> None:
        if self._is_changing:
            raise ViewChanged

    @override
    def is_ending(self) -> bool:
        return self.board.has_changed(self.view.number)

    @override
    def raise_change(self, error: BaseException) -> None:
        """Raise ViewChanged if an error comes from the end of this view.

        Waits a moment for the keeper to notice a death, longer if the error looks like one.
        """
        if isinstance(error, ViewChanged):
            raise error
        seconds = _NOTICE_SECONDS if is_secondary(error) else _SHORT_NOTICE_SECONDS
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return
        if await_true(self.is_ending, seconds):
            raise ViewChanged from error

    @override
    def at_end(self, stop: Callable[[], None]) -> None:
        self._endings.append(stop)

    def end(self) -> None:
        """Stop what uses groups of the view, before the group is left. Not collective.

        If a replica was lost, closes all connections: a thread that saves a checkpoint may wait for a replica that has
        given up the save, and whose main thread waits for this one.
        """
        if self.board.is_over(self.view.number):
            for group in self._groups:
                close_connections(group)
        self._groups.clear()
        while self._endings:
            self._endings.pop()()

    def find_changes(self) -> list[Change]:
        """The replicas that were lost and have joined, up to this view, in changes that nobody has recorded."""
        first = self.view.number
        while first > 0 and not self.board.is_marked(_RECORDED, str(first - 1)):
            first -= 1
        return [change for number in range(first, self.view.number + 1) for change in self.board.read(number).changes]

    def tell_recorded(self) -> None:
        """Say that the changes up to this view are recorded."""
        self.board.mark(_RECORDED, str(self.view.number))


class ViewStore(Store):
    """A store whose waits end when a replica of a view is lost. gloo waits in it for the addresses of its peers.

    A published address is returned also after the loss of its replica: either all replicas of a view get all addresses,
    or none does. gloo notices at once that nobody listens at an address, and one that was to connect to this replica is
    waited for as long as `CONNECT_SECONDS` says.
    """

    def __init__(self, store: Store, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_over = is_over

    @override
    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        self._store.set(key, value)

    @override
    def get(self, key: str) -> bytes:
        """The value of a key, once it is there. Raises ViewChanged as `wait` does."""
        self.wait([key])
        return self._store.get(key)

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, however long it takes. Raises ViewChanged if one is not there and the view is over."""
        while not self._store.check(keys):
            if self._is_over() and not self._store.check(keys):
                raise ViewChanged
            time.sleep(_LOOK_SECONDS)


def join_board() -> tuple[Board, Store]:
    """The keeper's board, and the store that it is in. Raises LaunchError if the keeper cannot be reached."""
    place = find_rendezvous()
    assert place is not None
    try:
        store = TCPStore(place.address, int(place.port), None, False, timedelta(seconds=_STORE_SECONDS))
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(f"the process that keeps the replicas is not at {place}: {error}") from error
    return Board(store), store


def form_alone() -> None:
    """Form a process group of this process alone."""
    _form(HashStore(), 0, 1, COLLECTIVE_SECONDS)


def leave_group() -> None:
    """End the process group without waiting for any peer: those that still wait for this one get an error.

    gloo closes its connections once nothing refers to its groups, so the caller must have dropped what it built in
    them. (torch's `abort` does not close them.)
    """
    if not dist.is_initialized():
        # torch has counted the group that could not be formed. The count is in the names of the next groups, and must
        # be the same in all replicas; it starts from 0 again when a default group is destroyed.
        form_alone()
    dist.destroy_process_group()
    gc.collect()


def _form(store: Store, rank: int, size: int, seconds: float) -> None:
    dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
