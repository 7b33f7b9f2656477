"""What replicas and their keeper tell each other, in a key-value store that the keeper holds.

The keeper publishes views: the replicas that train together from now on. A view is over when one of its replicas is
lost. Workers of parameter servers that wait for each other vote on every step. A step is committed when all of them
have voted for it, and given up when the view is over before that; the store decides which came first, so all learn the
same.

The store has no passwords: every process of this machine can write to it. So the keeper remembers what it has read, and
a wait either has a limit of its own or is watched by the caller.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from echelon.ground.errors import LaunchError, first_line

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOK_SECONDS = 0.0005
_PATIENT_LOOK_SECONDS = 0.02
# How long the first view may take, which needs every replica, and how long the last replicas wait for the first one to
# finish the run. As long as torch waits in a collective.
_FIRST_VIEW_SECONDS = _END_SECONDS = 900.0
_COMPLETE, _CHANGED = "complete", "changed"
_RECORDED = "recorded"
_COMMITTED, _LAST, _GIVEN_UP = "committed", "committed, the last of its view", "given up"


@dataclass(frozen=True)
class Change:
    """A replica that was lost, or has joined.

    Attributes:
        replica: its number, from 0; a replica that is started again keeps it.
        pid: the process that ended; of a replica that has joined its first one.
        time: when it was lost or ready to join, in UTC seconds.
        reason: how its process ended; None for one that has joined.
    """

    replica: int
    pid: int
    time: float
    reason: str | None = None


@dataclass(frozen=True)
class View:
    """The replicas that train together.

    Attributes:
        number: counts the views of an attempt, from 0.
        members: the names of the processes, in the order of ranks: replica after replica, those that train already
            first.
        changes: the replicas lost and joined since the view before.
    """

    number: int
    members: tuple[str, ...]
    changes: tuple[Change, ...] = ()


def name_member(replica: int, start: int, index: int) -> str:
    """The name of a process: its replica, how often that was started before, and its index in the replica."""
    return f"{replica}.{start}.{index}"


FIRST_MEMBER = name_member(0, 0, 0)


def split_member(member: str) -> tuple[str, int]:
    """The name of the start of a replica, which its processes share, and the index of a process in it."""
    start, _, index = member.rpartition(".")
    return start, int(index)


class MembershipStore:
    """The store, by its keys. Every method returns at once, except those that say what they wait for."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def publish(self, view: View) -> None:
        """Make this the newest view. Views are published in the order of their numbers, by the keeper."""
        self._store.set(f"view/{view.number}", json.dumps(asdict(view)))

    def is_published(self, number: int) -> bool:
        """Whether there is a view of this number."""
        return bool(self._store.check([f"view/{number}"]))

    def read(self, number: int) -> View:
        """The view of this number, which has been published. Raises LaunchError if it is damaged."""
        text = self._store.get(f"view/{number}")
        try:
            fields = json.loads(text)
            changes = tuple(Change(**field) for field in fields["changes"])
            return View(number, tuple(fields["members"]), changes)
        except (ValueError, TypeError, LookupError) as error:
            raise LaunchError(
                f"the list of replicas that train together (view {number}) is damaged: {first_line(error)}; another "
                "process of this machine may have written to the store of this job."
            ) from error

    def end(self, number: int) -> None:
        """Record that a replica of this view is lost."""
        self._store.set(f"over/{number}", "")

    def is_over(self, number: int) -> bool:
        """Whether a replica of this view is lost."""
        return bool(self._store.check([f"over/{number}"]))

    def has_changed(self, number: int) -> bool:
        """Whether this view is over, or another one is to follow it."""
        return self.is_over(number) or self.is_published(number + 1)

    def mark(self, word: str, member: str) -> None:
        """Record a word about a replica, such as that it `trains`, or about a view."""
        self._store.set(f"{word}/{member}", "")

    def is_marked(self, word: str, member: str) -> bool:
        """Whether `mark` was called with the same arguments."""
        return bool(self._store.check([f"{word}/{member}"]))

    def tell_ready(self, member: str) -> None:
        """Say that this process, by its name, can train."""
        self._store.set(_ready(member), str(os.getpid()))

    def find_pid(self, member: str) -> int | None:
        """The pid of a process that has said that it can train; None if it has not."""
        return int(self._store.get(_ready(member))) if self._store.check([_ready(member)]) else None

    def find_changes(self, number: int) -> list[Change]:
        """The replicas that were lost and have joined, up to this view, in changes that nobody has recorded."""
        first = number
        while first > 0 and not self.is_marked(_RECORDED, str(first - 1)):
            first -= 1
        return [change for view in range(first, number + 1) for change in self.read(view).changes]

    def tell_recorded(self, number: int) -> None:
        """Say that the changes up to this view are recorded."""
        self.mark(_RECORDED, str(number))

    def await_view(self, beyond: int, member: str, watch: Callable[[], None] = lambda: None) -> View:
        """Wait until all replicas of a view that has this one, and a number above `beyond`, wait for the same view.

        Calls `watch` at every look; it may raise to end the wait. Raises LaunchError if there is no first view in time.
        """
        number, deadline = beyond, time.monotonic() + _FIRST_VIEW_SECONDS
        while True:
            watch()
            while self.is_published(number + 1):
                number += 1
            if number < 0 and time.monotonic() > deadline:
                raise LaunchError(
                    f"the replicas were not all ready to train within {_FIRST_VIEW_SECONDS:g} s of this one; the logs "
                    "of the others say what they did."
                )
            if number > beyond and member in (view := self.read(number)).members and self._enter(view, member, watch):
                return view
            beyond = max(beyond, number)
            time.sleep(_PATIENT_LOOK_SECONDS)

    def _enter(self, view: View, member: str, watch: Callable[[], None]) -> bool:
        """Wait until all replicas of a view wait for it; False if it changes before. The same in all of them."""
        self.mark(f"here/{view.number}", member)
        while True:
            watch()
            is_complete = all(self.is_marked(f"here/{view.number}", member) for member in view.members)
            if is_complete or self.has_changed(view.number):
                return self._settle(f"entry/{view.number}", _COMPLETE if is_complete else _CHANGED) == _COMPLETE
            time.sleep(_PATIENT_LOOK_SECONDS)

    def _settle(self, key: str, finding: str) -> str:
        """Record what this replica has found, unless another one has recorded something; returns what is recorded."""
        return bytes(self._store.compare_set(key, "", finding)).decode()

    def vote(self, view: View, ballot: int) -> bool | None:
        """Vote for the step of this ballot; wait for the others, and return None if it is given up.

        Otherwise it is committed: returns whether another view follows this step. Ballots of a view count from 0, and
        every replica votes on each of them.
        """
        votes, result = f"votes/{view.number}/{ballot}", f"result/{view.number}/{ballot}"
        if self._store.add(votes, 1) == len(view.members):
            self._settle(result, _LAST if self.has_changed(view.number) else _COMMITTED)
            if ballot:  # every replica knows the earlier result
                for name in ("votes", "result"):
                    self._store.delete_key(f"{name}/{view.number}/{ballot - 1}")
        while not self._store.check([result]):
            if self.is_over(view.number):
                self._settle(result, _GIVEN_UP)
            time.sleep(_LOOK_SECONDS)
        decision = self._store.get(result).decode()
        return None if decision == _GIVEN_UP else decision == _LAST

    def await_end(self, view: View, is_first: bool) -> bool:
        """Wait until the first replica of the view has finished the run; return False if the view is over before.

        The first replica calls it when it has. Returns True after `_END_SECONDS`: the first one finishes alone.
        """
        if is_first:
            self.mark("finished", str(view.number))
        deadline = time.monotonic() + _END_SECONDS
        while True:
            if self.is_marked("finished", str(view.number)) or time.monotonic() > deadline:
                return True
            if self.is_over(view.number):
                return False
            time.sleep(_PATIENT_LOOK_SECONDS)


def _ready(member: str) -> str:
    return f"ready/{member}"


def await_true(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait at most this long until something holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PATIENT_LOOK_SECONDS)
    return True
