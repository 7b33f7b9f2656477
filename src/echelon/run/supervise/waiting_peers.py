"""What ranks that wait for each other tell: that they rest, that they have found a hang, that they have noticed it.

The ranks of a machine, or of all machines where no agent helps, write files into one folder: `resting-N` while rank N
rests, `late-N` and `hanging-N` in a hang. The agent of each of several machines tells the others what they say, one
message when it changes, and writes what the ranks of all machines say into `all-waiting`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.ground.stored import write_text

# A resting rank renews its file after the first number of seconds; after the second, an old file no longer counts,
# because its rank was ended or suspended. A network file system may show a change a minute late.
_RENEWAL_SECONDS = 5.0
_STALE_SECONDS = 90.0
# How long ranks wait for their peers to notice the same hang, also on other machines; and how often they look.
_ANSWER_SECONDS, _DISTANT_SECONDS = 5.0, 10.0
_LOOK_SECONDS = 0.1
_ALL = "all-waiting"


@dataclass(frozen=True)
class Waiting:
    """What ranks say in a long wait, those of a machine or all.

    Attributes:
        resting: the lowest number of a rest, as of `show_rest`; None if none rests.
        late: the seconds after which one has found a hang.
        hanging: those of a machine that have noticed it.
        missing: of all, those that have not; None while it is not known.
    """

    resting: int | None = None
    late: float | None = None
    hanging: tuple[int, ...] = ()
    missing: tuple[int, ...] | None = None

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> "Waiting":
        """From JSON."""
        missing = fields["missing"]
        return Waiting(
            fields["resting"],
            fields["late"],
            tuple(map(int, fields["hanging"])),
            None if missing is None else tuple(map(int, missing)),
        )


class WaitingPeers:
    """The ranks that write to the same folder as this one, and those of other machines, of which its agent tells.

    Errors of the file system are ignored: the ranks then know nothing about each other.
    """

    def __init__(self, folder: Path, rank: int, ranks: Sequence[int], has_distant: bool = False) -> None:
        """`ranks`: those that write to the folder. `has_distant`: whether there are others, of which an agent tells."""
        self._folder = folder
        self._rank = rank
        self._ranks = ranks
        self._has_distant = has_distant
        self._shown: tuple[int, float] | None = None
        self._fresh = _FreshFiles()

    def begin(self) -> None:
        """Remove what an earlier process of this rank has left."""
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            for kind in ("resting", "late", "hanging"):
                self._path(kind).unlink(missing_ok=True)

    def show_rest(self, number: int | None) -> None:
        """Show whether this rank rests; must be called again every few seconds while it does.

        `number`: counts the rests of all ranks together, from 1; 0 if this rank rests alone; None if it does not rest.
        """
        now = time.monotonic()
        with suppress(OSError):
            if number is None and self._shown is not None:
                self._shown = None
                self._path("resting").unlink(missing_ok=True)
            elif number is not None and self._is_old(number, now):
                self._shown = number, now
                self._path("resting").write_text(str(number), encoding="utf-8")

    def _is_old(self, number: int, now: float) -> bool:
        return self._shown is None or self._shown[0] != number or now - self._shown[1] > _RENEWAL_SECONDS

    def is_one_resting(self, number: int) -> bool:
        """Whether another rank rests, renews its file, and does not wait there for this rank.

        `number`: how many rests of all ranks together this one has begun.
        """
        rests = [self._fresh.read_number(self._path("resting", rank)) for rank in self._others()]
        rests.append(self._read_all().resting)
        return any(rest is not None and rest <= number for rest in rests)

    def tell_late(self, seconds: float) -> None:
        """Tell the others that this rank has found a hang, after these seconds without progress."""
        with suppress(OSError):
            write_text(self._path("late"), f"{seconds:g}")

    def find_late(self) -> float | None:
        """Return the seconds after which another rank has found a hang; None if none has."""
        for rank in self._others():
            with suppress(OSError, ValueError):
                return float(self._path("late", rank).read_text(encoding="utf-8"))
        return self._read_all().late

    def find_unresponsive(self) -> list[int]:
        """Return the ranks that have not noticed the hang; every rank that has must call it. Raises OSError."""
        self._path("hanging").touch()
        deadline = time.monotonic() + (_DISTANT_SECONDS if self._has_distant else _ANSWER_SECONDS)
        while (missing := self._find_missing()) != [] and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return self._list_missing_here() if missing is None else missing

    def _find_missing(self) -> list[int] | None:
        """The ranks that have not noticed the hang; None while that of other machines is not known."""
        if not self._has_distant:
            return self._list_missing_here()
        missing = self._read_all().missing
        return None if missing is None else list(missing)

    def _list_missing_here(self) -> list[int]:
        return [rank for rank in self._ranks if not self._path("hanging", rank).exists()]

    def _read_all(self) -> Waiting:
        """What the ranks of all machines say."""
        if self._has_distant:
            with suppress(OSError, ValueError, LookupError, TypeError):
                return Waiting.parse(json.loads((self._folder / _ALL).read_text(encoding="utf-8")))
        return Waiting()

    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._rank]

    def _path(self, kind: str, rank: int | None = None) -> Path:
        return self._folder / f"{kind}-{self._rank if rank is None else rank}"


class _FreshFiles:
    """Files that their writers renew, by the clock of this process."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, float]] = {}

    def read_number(self, path: Path) -> int | None:
        """The number in a file that has changed lately; None if there is none."""
        with suppress(OSError, ValueError):
            changed, now = path.stat().st_mtime_ns, time.monotonic()
            if self._seen.get(path, (None, 0.0))[0] != changed:
                self._seen[path] = changed, now
            if now - self._seen[path][1] < _STALE_SECONDS:
                return int(path.read_text(encoding="utf-8"))
        return None


class WaitingRanks:
    """What the ranks of a machine say, as its agent reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fresh = _FreshFiles()

    def read(self) -> Waiting:
        """Read the files of the ranks. Raises OSError if the folder is gone."""
        paths = list(self._folder.iterdir())
        rests = [self._fresh.read_number(path) for path in paths if path.name.startswith("resting-")]
        late = None
        for path in paths:
            if path.name.startswith("late-"):
                with suppress(OSError, ValueError):
                    late = float(path.read_text(encoding="utf-8"))
        hanging = [path.name.removeprefix("hanging-") for path in paths if path.name.startswith("hanging-")]
        return Waiting(
            min((rest for rest in rests if rest is not None), default=None),
            late,
            tuple(sorted(int(rank) for rank in hanging if rank.isdecimal())),
        )

    def show_all(self, waiting: Waiting) -> None:
        """Show the ranks of this machine what those of all machines say."""
        write_text(self._folder / _ALL, json.dumps(asdict(waiting)))
