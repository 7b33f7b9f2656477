"""The process groups of a view: replicas that train together until one of them is lost or another one joins.

Each process keeps its replica's own group, the default one, from its start to its end. The groups of a view are beside
it: they are left when the view ends.
"""

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from echelon.ground.errors import LaunchError, StoppedError
from echelon.ground.hosts import limit_silence_of
from echelon.ground.launch_environment import find_rendezvous
from echelon.learn.distributed.joint_group import JointGroup, OpenStep
from echelon.learn.distributed.mesh import Grid, Membership, Meshes, ViewChanged, all_reduce
from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS
from echelon.learn.distributed.torch_internals import find_backends, set_timeout
from echelon.learn.distributed.transport import ON_CPU, Communicator, Transport
from echelon.planner.plan import ParallelPlan
from echelon.run.supervise.board import MembershipStore, View, await_true
from echelon.run.supervise.outcome import LOST_SECONDS, is_secondary

logger = logging.getLogger(__name__)

_BACKEND = "gloo"
_STORE_SECONDS = 60.0
# A fifth of the time that gloo waits for a connection once all replicas have published their addresses.
CONNECT_SECONDS = 4.0
_LOOK_SECONDS, _WATCH_SECONDS = 0.002, 0.05
# A process that does not leave a group in this time after a loss ends, and is lost too. It may be in a long forward
# pass.
LEAVING_SECONDS = 120.0
# The same of a process that is still in the call of torch.distributed in which the loss has found it. gloo ends all
# waits but that for the rest of a message: its `Pair::signalException` passes over the one that is being read.
STUCK_SECONDS = 5.0
_CALLS = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py", "learn/distributed/mesh.py")
_FORMING = "_new_process_group_helper"
# A frame of a thread, and the instruction that it is at.
_Call = tuple[FrameType, int]
# How long the keeper may take to notice a death that a process has met as an error; of a machine, once it is silent.
# Where the other one has reported an error instead, the keeper ends this process meanwhile.
_NOTICE_SECONDS, _SHORT_NOTICE_SECONDS = 30.0, 2.0


@dataclass(frozen=True)
class Inside:
    """The processes of this replica: the default group, and one more for each group of a view that a thread uses.

    A thread may use its group of a view while the main thread uses another one.
    """

    groups: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of processes of a replica."""
        return dist.get_world_size()

    def of_thread(self, number: int) -> dist.ProcessGroup | None:
        """The group for a thread's group of a view, counted from 0. Collective. None for a single process."""
        if self.size == 1:
            return None
        while len(self.groups) <= number:
            self.groups.append(cast(dist.ProcessGroup, dist.new_group(backend=_BACKEND, group_desc="replica")))
        return self.groups[number]


@dataclass
class ViewMembership(Membership):
    """Replicas that agree on the keeper's board.

    Attributes:
        store: that of the board, in which the processes of the view find each other.
        member: the name of this process.
        inside: the processes of this replica.
        is_one_machine: whether all replicas are on this machine.
        transport: what this process sends over.
    """

    board: MembershipStore
    store: Store
    view: View
    member: str
    num_replicas: int
    inside: Inside
    num_essential: int = 0
    is_one_machine: bool = True
    transport: Transport = ON_CPU
    _num_ballots: int = 0
    _is_changing: bool = field(default=False)
    _step: OpenStep = field(default_factory=OpenStep)
    _groups: list[JointGroup] = field(default_factory=list)
    _communicators: list[Communicator] = field(default_factory=list)
    _watch: "LossWatch | None" = None
    _stores: list[Store] = field(default_factory=list)
    _endings: list[Callable[[], None]] = field(default_factory=list)

    @property
    @override
    def number(self) -> int:
        return self.view.number

    @property
    def rank(self) -> int:
        """This process's rank in the view: the processes of a replica are neighbours."""
        return self.view.members.index(self.member)

    @property
    def size(self) -> int:
        """The number of replicas of the view."""
        return len(self.view.members) // self.inside.size

    def form_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Form the groups of all processes of the view, and of those of one index in their replica. Collective.

        The former sends over gloo alone. Raises ViewChanged, or an error, if a replica is lost before it has published
        its address.
        """
        needs_communicator = self.transport.has_communicators and self.size > 1
        if needs_communicator:
            self._watch = LossWatch(self._is_over, self._close)
        everyone = self._form("everyone", self._find_places(), self.rank, len(self.view.members), self._own, self._step)
        if self.inside.size == 1 and not needs_communicator:
            return everyone, everyone
        replica, index = divmod(self.rank, self.inside.size)
        group, step = self._own, self._step
        return everyone, self._form("replica", {index: replica}, replica, self.size, group, step, needs_communicator)

    @override
    def new_group(self, purpose: str = "checkpoints") -> dist.ProcessGroup:
        group = self.inside.of_thread(len(self._groups))
        return self._form(purpose, self._find_places(), self.rank, len(self.view.members), group)

    def _is_over(self) -> bool:
        return self.board.is_over(self.view.number)

    def _close(self) -> None:
        for group in list(self._groups):
            group.close()
        for communicator in list(self._communicators):  # also one that is not connected yet
            communicator.end()

    @property
    def _own(self) -> dist.ProcessGroup | None:
        return None if self.inside.size == 1 else dist.group.WORLD

    def _find_places(self) -> dict[int, int]:
        """The ranks of this replica, with their ranks in the view."""
        first = self.rank - dist.get_rank()
        return {rank: first + rank for rank in range(self.inside.size)}

    def _form(
        self,
        name: str,
        places: Mapping[int, int],
        rank: int,
        size: int,
        own: dist.ProcessGroup | None,
        step: OpenStep | None = None,
        needs_communicator: bool = False,
    ) -> JointGroup:
        # torch does not refer to a store that is a Python object.
        prefix = f"group/{self.view.number}/{len(self._groups)}/{min(places)}"
        store = ViewStore(PrefixStore(prefix, self.store), self._is_over)
        self._stores.append(store)
        timeout = timedelta(seconds=CONNECT_SECONDS)
        communicator = None
        if needs_communicator:
            communicator = Communicator(self.transport.device, store)
            self._communicators.append(communicator)
            if self._is_over():  # the watch may have looked before
                communicator.end()
        group = JointGroup(
            lambda: dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, own, name, step, communicator
        )
        group.enlist(places, store)
        for backend in find_backends(group):
            set_timeout(backend, COLLECTIVE_SECONDS)
        if not self.is_one_machine:
            limit_silence_of(None, LOST_SECONDS)
        self._groups.append(group)
        return group

    @override
    def begin_step(self) -> None:
        if self.inside.size > 1:
            self._step.begin()

    @override
    def sees_next(self) -> bool:
        return self.rank == 0 and self.board.is_published(self.view.number + 1)

    @override
    def agree(self, values: torch.Tensor) -> torch.Tensor:
        if self._own is not None:
            values = self._step.end(values, self._own)
        self._is_changing = bool(values[0])
        return values

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
        raise_change(error, self.is_ending, self.is_one_machine)

    @override
    def at_end(self, stop: Callable[[], None]) -> None:
        self._endings.append(stop)

    def end(self) -> None:
        """Stop what uses groups of the view, before the group is left. Not collective.

        If a replica was lost, closes all connections: a thread that saves a checkpoint may wait for a replica that has
        given up the save, and whose main thread waits for this one. If not, waits for the others where leaving a group
        would end an operation of theirs.
        """
        if self._is_over():
            self._close()
        elif self._communicators and self._groups:
            self._groups[0].meet(CONNECT_SECONDS)
        while self._endings:
            self._endings.pop()()

    def leave(self) -> None:
        """Drop the groups of the view once nobody uses them here. Not collective: others may still wait in them.

        gloo closes its connections once nothing refers to its groups, so the caller must have dropped what it built in
        them. (torch's `abort` does not close them.)
        """
        for group in self._groups:
            group.leave()
        for communicator in self._communicators:
            communicator.end()
        if self._watch is not None:
            self._watch.leave()
        self._groups.clear()
        self._communicators.clear()
        self._step = OpenStep()
        self._stores.clear()
        gc.collect()

    def await_end(self) -> bool:
        """Wait until the first process of the view has finished the run; return False if the view is over before.

        Collective: the same on all processes of a replica.
        """
        is_done = torch.tensor(int(self.board.await_end(self.view, self.rank == 0)))
        all_reduce(is_done, dist.group.WORLD, dist.ReduceOp.MAX)
        return bool(is_done)


def raise_change(error: BaseException, is_ending: Callable[[], bool], is_one_machine: bool) -> None:
    """Raise ViewChanged if an error comes from a loss, which ends a view.

    Waits a moment for the keeper to notice a death, longer if the error looks like one.
    """
    if isinstance(error, ViewChanged):
        raise error
    if isinstance(error, KeyboardInterrupt | SystemExit | StoppedError):
        return
    usual = _NOTICE_SECONDS if is_one_machine else _NOTICE_SECONDS + LOST_SECONDS
    if await_true(is_ending, usual if is_secondary(error) else _SHORT_NOTICE_SECONDS):
        raise ViewChanged from error


def join_replicas(
    inside: Meshes, plan: ParallelPlan, everyone: dist.ProcessGroup, outer: dist.ProcessGroup, membership: Membership
) -> Meshes:
    """The meshes of a replica, which has the default group for itself, among the replicas of a view.

    Args:
        plan: that of all replicas.
        everyone: all ranks of the view, replica after replica.
        outer: the ranks of the view with this rank's index in their replica.
    """
    grid = Grid(plan)
    return replace(
        inside,
        grid=grid,
        place=grid.place(dist.get_rank(everyone)),
        everyone=everyone,
        outer=outer if plan.num_replicas > 1 else None,
        membership=membership,
    )


class LossWatch:
    """A thread that ends all waits of this process in its groups after a loss, and after some time this process."""

    def __init__(self, is_over: Callable[[], bool], close: Callable[[], None]) -> None:
        """`is_over`: whether a process of the groups is lost; `close` ends the waits."""
        self._is_over = is_over
        self._close = close
        self._is_left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="losses", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over():
            if self._is_left.wait(_WATCH_SECONDS):
                return
        limit = threading.Timer(LEAVING_SECONDS, _end_process, (LEAVING_SECONDS,))
        limit.daemon = True
        limit.start()
        self._close()
        calls = set[_Call]()
        while not self._is_left.wait(STUCK_SECONDS):
            before, calls = calls, _find_calls()
            if before & calls:
                _end_process(STUCK_SECONDS)
        limit.cancel()

    def leave(self) -> None:
        """End the thread, once this process uses none of the groups."""
        self._is_left.set()
        self._thread.join()


def _find_calls() -> set[_Call]:
    """The calls of torch.distributed, and waits for them, in which threads are here, but those that form a group."""
    calls = set[_Call]()
    for frame in sys._current_frames().values():
        codes = [outer.f_code for outer, _ in islice(walk_stack(frame), 3)]  # torch's own functions around a call
        innermost = next((code for code in codes if code.co_filename.endswith(_CALLS)), None)
        if innermost is not None and innermost.co_name != _FORMING:
            calls.add((frame, frame.f_lasti))
    return calls


def _end_process(seconds: float) -> None:
    logger.error(f"this process did not leave its groups {seconds:g} s after a loss, and ends")
    sys.stdout.flush()
    faulthandler.dump_traceback()
    os._exit(1)


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
    def add(self, key: str, num: int) -> int:
        """Add to a counter; returns its new value."""
        return self._store.add(key, num)

    @override
    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(keys)

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


def join_board() -> tuple[MembershipStore, Store]:
    """The keeper's board, and the store that it is in. Raises LaunchError if the keeper cannot be reached."""
    rendezvous = find_rendezvous()
    assert rendezvous is not None
    try:
        store = TCPStore(rendezvous.address, int(rendezvous.port), None, False, timedelta(seconds=_STORE_SECONDS))
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(f"the process that keeps the replicas is not at {rendezvous}: {error}") from error
    return MembershipStore(store), store


def form_inside(store: Store, start: str, index: int, size: int, backend: str = _BACKEND) -> None:
    """Form the default process group: the processes of this start of a replica. Collective.

    `index`: of this process, of `size`. Raises LaunchError if another one cannot be reached.
    """
    group_store = HashStore() if size == 1 else PrefixStore(f"inside/{start}", store)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    try:
        dist.init_process_group(backend, store=group_store, rank=index, world_size=size, timeout=timeout)
    except dist.DistError as error:
        raise LaunchError(f"the processes of replica {start} could not connect to each other: {error}") from error
