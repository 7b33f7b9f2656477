"""What the ranks of a run that share files tell each other there about waiting: who rests, and who has found a hang."""

import time
from contextlib import suppress
from pathlib import Path

from echelon.ground.stored import write_text

# A resting rank renews its file after the first number of seconds; after the second, an old file no longer counts,
# because its rank was ended or suspended. A network file system may show a change a minute late.
_RENEWAL_SECONDS = 5.0
_STALE_SECONDS = 90.0
# How long ranks wait for their peers to notice the same hang, and the interval at which they look.
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.1


class WaitingPeers:
    """The ranks that write to the same folder: `resting-N` while rank N rests, `late-N` and `hanging-N` in a hang.

    Errors of the file system are ignored: the ranks then know nothing about each other.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._shown: tuple[int, float] | None = None
        self._seen: dict[int, tuple[int, float]] = {}

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
        now = time.monotonic()
        for rank in self._others():
            with suppress(OSError, ValueError):
                path = self._path("resting", rank)
                changed = path.stat().st_mtime_ns
                if self._seen.get(rank, (None, 0.0))[0] != changed:
                    self._seen[rank] = changed, now
                is_new = now - self._seen[rank][1] < _STALE_SECONDS
                if is_new and int(path.read_text(encoding="utf-8")) <= number:
                    return True
        return False

    def tell_late(self, seconds: float) -> None:
        """Tell the others that this rank has found a hang, after these seconds without progress."""
        with suppress(OSError):
            write_text(self._path("late"), f"{seconds:g}")

    def find_late(self) -> float | None:
        """Return the seconds after which another rank has found a hang; None if none has."""
        for rank in self._others():
            with suppress(OSError, ValueError):
                return float(self._path("late", rank).read_text(encoding="utf-8"))
        return None

    def find_unresponsive(self) -> list[int]:
        """Return the ranks that have not noticed the hang; every rank that has must call it. Raises OSError."""
        self._path("hanging").touch()
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (missing := self._find_missing()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return missing

    def _find_missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._path("hanging", rank).exists()]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def _path(self, kind: str, rank: int | None = None) -> Path:
        return self._folder / f"{kind}-{self._rank if rank is None else rank}"
