"""What replicas and their keeper tell each other, in a key-value store that the keeper holds.

The keeper publishes views: the replicas that train together from now on. A view is over when one of its replicas is
lost. The replicas of a view vote on every step. A step is committed when all of them have voted for it, and given up
when the view is over before that; the store decides which came first, so all replicas learn the same.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOK_SECONDS = 0.0005
_PATIENT_LOOK_SECONDS = 0.02
_COMMITTED, _LAST, _GIVEN_UP = "committed", "committed, the last of its view", "given up"


@dataclass(frozen=True)
class Change:
    """A replica that was lost, or has joined.

    Attributes:
        replica: its number, from 0; a replica that is started again keeps it.
        pid: its process.
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
        members: a name for each start of a replica, in the order of ranks: those that train already come first.
        changes: the replicas lost and joined since the view before.
    """

    number: int
    members: tuple[str, ...]
    changes: tuple[Change, ...] = ()


class Board:
    """The store, by its keys. Every method returns at once, except those that say what they wait for."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def publish(self, view: View) -> None:
        """Make this the newest view. Views are published in the order of their numbers, by the keeper."""
        self._store.set(f"view/{view.number}", json.dumps(asdict(view)))
        self._store.add("views", 1)

    def newest(self) -> int:
        """The number of the newest view; -1 before the first one."""
        return int(self._store.add("views", 0)) - 1

    def read(self, number: int) -> View:
        """The view of this number, which has been published."""
        fields = json.loads(self._store.get(f"view/{number}"))
        changes = tuple(Change(**each) for each in fields["changes"])
        return View(fields["number"], tuple(fields["members"]), changes)

    def end(self, number: int) -> None:
        """Record that a replica of this view is lost."""
        self._store.set(f"over/{number}", "")

    def is_over(self, number: int) -> bool:
        """Whether a replica of this view is lost."""
        return bool(self._store.check([f"over/{number}"]))

    def has_changed(self, number: int) -> bool:
        """Whether this view is over, or another one is to follow it."""
        return self.is_over(number) or self.newest() > number

    def mark(self, word: str, member: str) -> None:
        """Record a word about a replica, such as `ready` to join or that it `trains`, or about a view."""
        self._store.set(f"{word}/{member}", "")

    def is_marked(self, word: str, member: str) -> bool:
        """Whether `mark` was called with the same arguments."""
        return bool(self._store.check([f"{word}/{member}"]))

    def await_view(self, beyond: int, member: str) -> View:
        """Wait until all replicas of a view that has this one, and a number above `beyond`, wait for the same view."""
        while True:
            number = self.newest()
            if number > beyond and member in (view := self.read(number)).members:
                self.mark(f"here/{number}", member)
                for _ in _looks(_PATIENT_LOOK_SECONDS):
                    if all(self.is_marked(f"here/{number}", each) for each in view.members):
                        return view
                    if self.has_changed(number):
                        beyond = number
                        break
            time.sleep(_PATIENT_LOOK_SECONDS)

    def vote(self, view: View, ballot: int) -> bool | None:
        """Vote for the step of this ballot; wait for the others, and return None if it is given up.

        Otherwise it is committed: returns whether another view follows this step. Ballots of a view count from 0, and
        every replica votes on each of them.
        """
        votes, result = f"votes/{view.number}/{ballot}", f"result/{view.number}/{ballot}"
        if self._store.add(votes, 1) == len(view.members):
            self._store.compare_set(result, "", _LAST if self.has_changed(view.number) else _COMMITTED)
            if ballot:  # every replica knows the earlier result
                for each in ("votes", "result"):
                    self._store.delete_key(f"{each}/{view.number}/{ballot - 1}")
        for _ in _looks(_LOOK_SECONDS):
            if self._store.check([result]):
                break
            if self.is_over(view.number):
                self._store.compare_set(result, "", _GIVEN_UP)
        found = self._store.get(result).decode()
        return None if found == _GIVEN_UP else found == _LAST

    def await_end(self, view: View, is_first: bool) -> bool:
        """Wait until the first replica of the view has finished the run; return False if the view is over before.

        The first replica calls it when it has.
        """
        if is_first:
            self.mark("finished", str(view.number))
        for _ in _looks(_PATIENT_LOOK_SECONDS):
            if self.is_marked("finished", str(view.number)):
                return True
            if self.is_over(view.number):
                return False
        raise AssertionError("not reached")


def await_true(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait at most this long until something holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PATIENT_LOOK_SECONDS)
    return True


def _looks(pause_seconds: float) -> Iterator[None]:
    """Yield forever, with pauses."""
    while True:
        yield
        time.sleep(pause_seconds)
