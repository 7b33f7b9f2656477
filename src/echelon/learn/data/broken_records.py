"""Counts the records of a source that cannot be used, and refuses a source with too many of them."""

import math
from dataclasses import dataclass, field

from echelon.ground.errors import DataError
from echelon.learn.data.readers import HOPELESS_RECORDS, name_place
from echelon.learn.data.readers.record import Broken
from echelon.learn.data.source import Source
from echelon.recipe.data_formats import describe_formats

_LISTED_PLACES = 20
_SAID_PLACES = 3


@dataclass
class RecordCounts:
    """The usable documents of a source, its broken records, and the places and problems of the first of these."""

    documents: int = 0
    broken: int = 0
    places: list[str] = field(default_factory=list)

    @property
    def records(self) -> int:
        """All records, usable or not."""
        return self.documents + self.broken

    @property
    def is_hopeless(self) -> bool:
        """Whether none of many records can be used."""
        return self.documents == 0 and self.broken >= HOPELESS_RECORDS

    def add_broken(self, broken: Broken) -> None:
        """Count broken records."""
        self.broken += broken.count
        if len(self.places) < _LISTED_PLACES:
            self.places.append(f"{name_place(broken)} {broken.problem}")

    def say_places(self) -> str:
        """The first places, with their problems."""
        return "; ".join(self.places[:_SAID_PLACES]) + ("; and more" if self.broken > _SAID_PLACES else "")


def refuse_broken(source: Source, counts: RecordCounts, most: float, records: int | None) -> DataError:
    """Return the error about a source with too many broken records.

    `most`: `data.max_broken_fraction`. `records`: all records of the source; None: it was not read to its end.
    """
    total = records or counts.records
    formats = "" if counts.documents else f"; {describe_formats()}"
    none = f", which allows none of {total:,}" if records is not None and 0 < most * total < 1 else ""
    enough = f", or drop them with data.max_broken_fraction={_round_up(counts.broken / total):g}"
    return DataError(
        f"{source}: {counts.broken:,} of {total:,} records cannot be used, more than "
        f"data.max_broken_fraction={most:g}{none}: {counts.say_places()}{formats}. Fix "
        f"them{enough if counts.documents and records is not None else ''}."
    )


def _round_up(share: float) -> float:
    """Round a share up to two significant digits, at most 1."""
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    return min(1.0, math.ceil(share / unit - 1e-9) * unit)
