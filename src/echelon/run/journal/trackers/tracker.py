"""The tracker protocol, and the conversion of a row of metrics.jsonl to metrics."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

# The last step that a tracker has for each kind of row; 0 if none.
Held = defaultdict[str, int]

# Everything before the @ of an address: a password, or a token on its own.
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")


@dataclass(frozen=True)
class Opened:
    """An open tracker: the rows it already has, and the address to view it."""

    held: Held
    where: str


class Tracker(Protocol):
    """A destination of metrics. Only the thread of its forwarder uses it; every call may raise.

    `is_store`: it accepts rows of a finished run. A tracker is called with the recipe, the run folder, and the step of
    the checkpoint that the run continues from, or 0.
    """

    name: str
    is_store: ClassVar[bool] = False

    def open(self, run_key: str, given: Mapping[str, int]) -> Opened:
        """Create the tracking run of this key, or find it. Also called to reconnect after any failure.

        `given`: the steps already sent according to the run folder, for trackers that cannot be queried.
        """

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Store all these rows, in order."""

    def finish(self, done: bool) -> None:
        """Store the final files, and close the tracking run. `done`: the run reached its last step."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row except the step, named KIND/KEY, and KIND/SET/KEY for those of its sets or tasks."""
    return {
        f"{row['kind']}/{name}": value
        for name, value in [*_numbers(row), *_numbers_of_sets(row.get("sets") or row.get("tasks") or {})]
        if name != "step"
    }


def scalars_by_set(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """The numbers of each validation set of a row, named KIND/KEY; first the row's own, under an empty name."""
    yield "", scalars({**row, "sets": None})
    for name, values in (row.get("sets") or {}).items():
        yield name, scalars({**values, "kind": row["kind"]})


def _numbers_of_sets(sets: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    for set_name, values in sets.items():
        for key, value in _numbers(values):
            yield f"{set_name}/{key}", value


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def has_login(address: str) -> bool:
    """Whether an address contains a user name or password."""
    return bool(_LOGIN.search(address))
