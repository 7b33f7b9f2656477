"""Counts records that cannot be used, of which a source may have few, and suspicious ones, which are reported."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import dropwhile

from echelon.ground.errors import DataError
from echelon.learn.data.conversation import Completion, Conversation, Judged, Parsed, Preference
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


EMPTY_ANSWER = "an empty answer that is not trained on"
EMPTY_REJECTED = "an empty rejected answer"
BEGINS_WITH_ASSISTANT = "an assistant turn at the beginning"
ENDS_WITH_USER = "a user turn at the end"

SAMPLED_DOCUMENTS = 4096
"""The maximum number of documents, selected by hash, among which duplicates are searched."""

WORTH_SAYING = 0.01
"""A smaller fraction of duplicates is not reported."""

_MEANINGS = {
    EMPTY_ANSWER: "the model reads it before later turns",
    EMPTY_REJECTED: "the model learns to answer at all, not which answer is better",
    BEGINS_WITH_ASSISTANT: "no question precedes it",
    ENDS_WITH_USER: "no answer follows",
}


def find_oddities(example: Parsed) -> Iterator[str]:
    """Yield the oddities of an example that `check_answers` has passed, each once."""
    example = example.text if isinstance(example, Judged) else example
    texts = (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
    conversations = [text for text in texts if isinstance(text, Conversation)]
    if isinstance(example, Preference) and _has_empty_answer(example.rejected):
        yield EMPTY_REJECTED
    elif any(map(_has_empty_answer, texts)):
        yield EMPTY_ANSWER
    if any(_roles(text)[:1] == ["assistant"] for text in conversations):
        yield BEGINS_WITH_ASSISTANT
    if any(_roles(text)[-1:] == ["user"] for text in conversations):
        yield ENDS_WITH_USER


def describe_oddity(source: str, what: str, count: int, total: int, place: str) -> str:
    """Describe one kind of oddity of a source in one line."""
    return f"{source}: {count:,} of {total:,} examples have {what}: {_MEANINGS[what]} (the first: {place})"


def _has_empty_answer(text: Parsed) -> bool:
    if isinstance(text, Completion):
        return not text.completion.strip()
    return isinstance(text, Conversation) and any(map(text.is_empty, range(len(text.messages))))


def _roles(conversation: Conversation) -> list[str]:
    """The roles of the turns, without system messages at the beginning."""
    roles: list[str] = [message["role"] for message in conversation.messages]
    return list(dropwhile(lambda role: role == "system", roles))


@dataclass
class CopySample:
    """Estimates the share of duplicates in the training text from a small sample of the documents.

    The sample consists of the documents whose hash ends in `shift` zero bits, so it contains either all copies of a
    document or none. `seen` maps their hashes to whether they are validation text. Counts are scaled to all documents:
    one in the sample counts 2^shift. `held_out`: training documents that are also validation text.
    """

    shift: int = 0
    seen: dict[str, bool] = field(default_factory=dict)
    counted: int = 0
    copies: int = 0
    held_out: int = 0

    def add(self, hash: int, is_validation: bool) -> None:
        """Add a document. Validation text must be added first."""
        if hash & ((1 << self.shift) - 1):
            return
        key, weight = f"{hash:x}", 1 << self.shift
        if not is_validation:
            self.counted += weight
            self.copies += weight if self.seen.get(key) is False else 0
            self.held_out += weight if self.seen.get(key) else 0
        self.seen.setdefault(key, is_validation)
        if len(self.seen) > SAMPLED_DOCUMENTS:
            self.shift += 1
            self.seen = {key: value for key, value in self.seen.items() if not int(key, 16) & ((1 << self.shift) - 1)}

    def describe(self) -> Iterator[str]:
        """Yield a line about duplicates and one about copies of validation text, if there are enough of them."""
        about = "about " if self.shift else ""
        for count, what, remedy in (
            (self.copies, "copies of others", "drops them"),
            (self.held_out, "also validation text", "does not train on them"),
        ):
            if count > WORTH_SAYING * self.counted:
                share = f"{about}{count / self.counted:.0%} of the {self.counted:,} documents"
                yield f"data.train: {share} are {what}; data.deduplicate=true {remedy}"
