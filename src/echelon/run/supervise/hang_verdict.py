"""Names the rank that a hanging job waits for, from what each rank recorded as it noticed the hang. No torch.

Collectives are compared by their numbers within each process group: NCCL records which are over, gloo does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.ground.stored import read_as

FOLDER = "hang"
"""The folder of the records, in the folder of outcomes of a run."""


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
