"""What ranks that wait for each other tell, and which rank a hanging job waits for. No torch.

The ranks of a machine, or of all machines where no agent helps, write files into one folder: `resting-N` while rank N
rests, `late-N` and `hanging-N` in a hang. The agent of each of several machines tells the others what they say, one
message when it changes, and writes what the ranks of all machines say into `all-waiting`.

Each rank also records what it did as it noticed the hang. Collectives are compared by their numbers within each process
group: NCCL records which are over, gloo does not.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.ground.stored import read_as, read_text, write_text

FOLDER = "hang"
"""The folder of the records, in the folder of outcomes of a run."""

# A resting rank renews its file after the first number of seconds; after the second, an old file no longer counts,
# because its rank was ended or suspended. A network file system may show a change a minute late.
_RENEWAL_SECONDS = 5.0
_STALE_SECONDS = 90.0
# How long ranks wait for their peers to notice the same hang, also on other machines; and how often they look.
_ANSWER_SECONDS, _DISTANT_SECONDS = 5.0, 10.0
_LOOK_SECONDS = 0.1
_ALL = "all-waiting"


@dataclass(frozen=True)
class Collective:
    """A collective that a rank entered: its number within its group counts from 1; `sizes` are those of its inputs."""

    group: str
    number: int
    name: str
    sizes: list[list[int]]
    is_over: bool


@dataclass(frozen=True)
class WatchedGroup:
    """A process group: its name for the user, and its global ranks."""

    name: str
    ranks: list[int]


@dataclass(frozen=True)
class HangRecord:
    """What one rank left: the collectives that it entered, oldest first, by the key of their group in `groups`.

    `place`: file, line and function where its main thread stood. `waits_in`: the function of torch in which it waited
    there for other ranks, also for a message of one rank, of which gloo keeps no record, or for its GPU; or the first
    collective that its GPU has not finished; None if it did not wait.
    """

    rank: int
    place: str
    waits_in: str | None
    groups: dict[str, WatchedGroup]
    collectives: list[Collective]


def find_record_path(outcomes_dir: Path, rank: int) -> Path:
    """Return the path of a rank's record."""
    return outcomes_dir / FOLDER / f"rank-{rank:05d}.json"


def read_records(outcomes_dir: Path) -> list[HangRecord]:
    """Return the readable records, by rank."""
    records = []
    for path in sorted((outcomes_dir / FOLDER).glob("rank-*.json")):
        try:
            records.append(read_as(path, HangRecord))
        except (OSError, ValueError):
            continue
    return records


def explain_hang(records: Sequence[HangRecord], silent: Sequence[int] = ()) -> str:
    """Return a sentence about the rank, the collective and the group that the job waits for; empty if unknown.

    `silent`: ranks that left no record, because they are suspended or their machine is gone.
    """
    groups = {key: group for record in records for key, group in record.groups.items()}
    entered = {key: _by_rank(records, key) for key in groups}
    for key, group in groups.items():
        if message := _find_mismatch(group, entered[key]):
            return message
    if silent:
        return _find_wait(records, silent)
    return _find_missing(records, groups, entered) or _find_absent(records)


def _by_rank(records: Sequence[HangRecord], key: str) -> dict[int, dict[int, Collective]]:
    """Return the collectives of a group, by number, of each of its members with a record."""
    return {
        record.rank: {collective.number: collective for collective in record.collectives if collective.group == key}
        for record in records
        if key in record.groups
    }


def _find_mismatch(group: WatchedGroup, entered: Mapping[int, Mapping[int, Collective]]) -> str:
    """Describe the first collective of a group that its members entered differently; empty if there is none."""
    for number in sorted({number for those in entered.values() for number in those}):
        by_rank = {rank: those[number] for rank, those in sorted(entered.items()) if number in those}
        first, one = next(iter(by_rank.items()))
        for rank, other in by_rank.items():
            # Other collectives may have inputs of different sizes.
            differs = other.name != one.name or (one.name == "all_reduce" and other.sizes != one.sizes)
            if differs:
                return (
                    f"collective {number} of group {group.name} is {_describe(one)} on rank {first}, but "
                    f"{_describe(other)} on rank {rank}; the ranks ran different code, or had data of different shapes"
                )
    return ""


def _describe(collective: Collective) -> str:
    return f"{collective.name} of sizes {collective.sizes}"


def _find_missing(
    records: Sequence[HangRecord],
    groups: Mapping[str, WatchedGroup],
    entered: Mapping[str, Mapping[int, Mapping[int, Collective]]],
) -> str:
    """Describe the collective that a rank never entered, if that rank does not itself wait for another."""
    reached = {key: {rank: max(those, default=0) for rank, those in entered[key].items()} for key in groups}
    late = {
        key: {rank for rank, number in numbers.items() if number < max(numbers.values())}
        for key, numbers in reached.items()
    }
    waiting = {rank for key, behind in late.items() if behind for rank in reached[key] if rank not in behind}
    # A late rank is late in all its groups, and first in the smallest.
    for key in sorted(groups, key=lambda key: len(groups[key].ranks)):
        for record in records:
            if record.rank in late[key] - waiting:
                what = _describe_entry(reached[key][record.rank] + 1, groups[key], entered[key])
                return _describe_late(record, what, [other for other in records if other.rank not in late[key]])
    return ""


def _describe_entry(number: int, group: WatchedGroup, entered: Mapping[int, Mapping[int, Collective]]) -> str:
    """Return the name and the number of a collective, and its group."""
    name = next((those[number].name for those in entered.values() if number in those), "collective")
    return f"{name} {number} of group {group.name} (ranks {', '.join(map(str, group.ranks))})"


def _describe_late(record: HangRecord, what: str, others: Sequence[HangRecord]) -> str:
    """Describe a rank that never entered a collective, `what`, which others are in."""
    if record.waits_in is None:
        return f"rank {record.rank} never entered {what}; it is at {record.place}"
    # It waits for a message of one that waits for it: neither of them is late.
    there = ", ".join(f"rank {other.rank} is at {other.place}" for other in others)
    return (
        f"rank {record.rank} never entered {what}; it waits for a message at {record.place}; {there}; the ranks ran "
        "different code"
    )


def _find_absent(records: Sequence[HangRecord]) -> str:
    """Describe the ranks that wait for nobody, if the others do: where collectives do not tell, their code does."""
    absent = [record for record in records if record.waits_in is None]
    waiting = [record for record in records if record.waits_in is not None]
    if not absent or not waiting:
        return ""
    missing = "; ".join(f"rank {record.rank} does not wait for others: it is at {record.place}" for record in absent)
    ranks = "rank " + ", ".join(str(record.rank) for record in waiting)
    return f"{missing}; {ranks} waits for a message at {waiting[0].place}"


def _list_open(record: HangRecord) -> list[Collective]:
    """Return the collectives that a rank waits in; the last one is over if it has failed."""
    unfinished = [collective for collective in record.collectives if not collective.is_over]
    last = record.collectives[-1:]
    return unfinished or [collective for collective in last if collective.name == record.waits_in]


def _find_wait(records: Sequence[HangRecord], silent: Sequence[int]) -> str:
    """Describe the collective in which a rank waits for one of these ranks, in the smallest group."""
    open_ones = [(record, collective) for record in records for collective in _list_open(record)]
    for record, collective in sorted(open_ones, key=lambda pair: len(pair[0].groups[pair[1].group].ranks)):
        group = record.groups[collective.group]
        if set(silent) & set(group.ranks):
            return (
                f"rank {record.rank} waits for it in {collective.name} {collective.number} of group {group.name} "
                f"(ranks {', '.join(map(str, group.ranks))}), at {record.place}"
            )
    return next(
        (f"rank {record.rank} waits for a message at {record.place}" for record in records if record.waits_in), ""
    )


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
                return float(read_text(self._path("late", rank)))
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
            with suppress(OSError, ValueError):
                return read_as(self._folder / _ALL, Waiting)
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
                return int(read_text(path))
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
                    late = float(read_text(path))
        hanging = [path.name.removeprefix("hanging-") for path in paths if path.name.startswith("hanging-")]
        return Waiting(
            min((rest for rest in rests if rest is not None), default=None),
            late,
            tuple(sorted(int(rank) for rank in hanging if rank.isdecimal())),
        )

    def show_all(self, waiting: Waiting) -> None:
        """Show the ranks of this machine what those of all machines say."""
        write_text(self._folder / _ALL, json.dumps(asdict(waiting)))
