"""What a reader works with: the files of a source, spans of a file, and the records in a span.

A *document* is what the separator follows and what the validation split and deduplication look at: a text file, a line
of .jsonl, a row of a table, a run of ids up to the separator. A *span* is a part of a file that any process can read on
its own. Spans are a function of the files alone, so however many processes read them, the tokens are the same.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.errors import DataError
from echelon.recipe.data_formats import RECORD_FORMATS

PIECE_BYTES = 2**20
"""A span holds at least this much of its file, if there is so much left, and about as much."""

HASHED_BYTES = PIECE_BYTES
"""The hash that decides a document's side of the validation split reads at most so much from its start."""

DIGEST_BYTES = 16

TokenIds = npt.NDArray[np.integer[Any]]

Example = Mapping[str, Any]
"""A record of an instruction format: the values of the format's fields, by the format's own names for them."""

Content = bytes | TokenIds | Example

_SPLIT_KEY = b"echelon validation 1"
_TEXT_KEY = b"echelon document text 1"
_IDS_KEY = b"echelon document ids 1"
_EXAMPLE_KEY = b"echelon document example 1"


class BrokenRecordError(Exception):
    """A record cannot be used; the message says what is wrong with it, to be put behind its place."""


@dataclass(frozen=True)
class Fields:
    """Where a record holds its text, or its token ids. Both given: the text, or without such a field the ids."""

    text: str | None = "text"
    tokens: str | None = "input_ids"

    def __str__(self) -> str:
        """The fields looked for, as messages name them."""
        return " or ".join(f"`{name}`" for name in (self.text, self.tokens) if name is not None)

    @property
    def fix(self) -> str:
        """What to write in the recipe where a file has none of the fields."""
        return "fields: {text: NAME}"

    def choose(self, names: Iterable[str]) -> str | None:
        """The field to read of records that have these; None when neither is there."""
        present = set(names)
        return next((name for name in (self.text, self.tokens) if name is not None and name in present), None)

    def columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """The columns to read of a table that has these; none when what is needed is not there."""
        name = self.choose(names)
        return () if name is None else (name,)

    def pick(self, record: Any) -> Content:
        """The text of a record as UTF-8, or its ids. Raises BrokenRecordError."""
        if not isinstance(record, Mapping):
            raise BrokenRecordError("is no JSON object")
        name = self.choose(record)
        if name is None:
            raise BrokenRecordError(f"has no field {self}; `fields: {{text: NAME}}` beside the path names another")
        return encode_text(record[name], name) if name == self.text else parse_ids(record[name], name)


EITHER_FIELD = Fields()
"""What is read where the recipe names no field."""


@dataclass(frozen=True)
class ExampleFields:
    """Where records of an instruction format hold their parts: the format, and the names that differ from its own.

    `names` has (the format's name, the record's) in pairs, for fields of the record and of its turns.
    """

    format: str
    names: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The fields that a record must have, as messages name them."""
        return " and ".join(f"`{self._name(field)}`" for field in RECORD_FORMATS[self.format].required)

    @property
    def fix(self) -> str:
        """See Fields."""
        return f"fields: {{{RECORD_FORMATS[self.format].required[0]}: NAME}}"

    def columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """See Fields."""
        present, row = set(names), RECORD_FORMATS[self.format]
        if not all(self._name(field) in present for field in row.required):
            return ()
        return tuple(self._name(field) for field in row.fields if self._name(field) in present)

    def pick(self, record: Any) -> Content:
        """The fields of a record that the format has, by the format's names; without those that are null.

        Raises BrokenRecordError for a record that lacks one by which the format is recognised.
        """
        if not isinstance(record, Mapping):
            raise BrokenRecordError("is no JSON object")
        row = RECORD_FORMATS[self.format]
        values = {field: record.get(self._name(field)) for field in row.fields}
        for field in row.required:
            if values[field] is None:
                raise BrokenRecordError(
                    f"has no field `{self._name(field)}`, as records of the format {self.format} do"
                )
        turn_names = {theirs: ours for ours, theirs in self.names if ours in row.turn_fields}
        return {
            field: _rename_turns(value, turn_names) if turn_names and field in row.turns else value
            for field, value in values.items()
            if value is not None
        }

    def _name(self, field: str) -> str:
        return next((theirs for ours, theirs in self.names if ours == field), field)


class AllFields:
    """All of a record, for a look at what it has."""

    fix = ""

    def columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """See Fields."""
        return tuple(names)

    def pick(self, record: Any) -> Content:
        """See Fields."""
        if not isinstance(record, Mapping):
            raise BrokenRecordError("is no JSON object")
        return record


ALL_FIELDS = AllFields()


def _rename_turns(value: Any, names: Mapping[str, str]) -> Any:
    """A turn, or a list of them, with the format's names; anything else as it is, to be refused where it is read."""
    if isinstance(value, Mapping):
        return _rename_turns([value], names)[0]
    if not isinstance(value, list):
        return value
    return [
        {names.get(key, key): each for key, each in turn.items()} if isinstance(turn, Mapping) else turn
        for turn in value
    ]


def encode_text(value: object, name: str) -> bytes:
    """A field's text as UTF-8. Raises BrokenRecordError for what is no text."""
    if not isinstance(value, str):
        raise BrokenRecordError(f"holds no text in `{name}`")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BrokenRecordError(f"holds text that is not UTF-8 in `{name}` ({error.reason})") from error


def parse_ids(value: object, name: str) -> TokenIds:
    """A field's token ids `[n]`. Raises BrokenRecordError for what is no list of whole numbers."""
    try:
        ids = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise BrokenRecordError(f"holds no list of ids in `{name}`") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BrokenRecordError(f"holds no list of ids in `{name}`")
    return ids if ids.size else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, as it was when listed.

    `format` is a row of the table of formats, or a reader from outside. `required`: named by the user, so it may not be
    skipped. `rows` bounds the records that belong to the source, where a split takes some of them; `split` and
    `revision` choose within a dataset that is streamed. `options`: what a reader from outside is made with, as JSON.
    """

    path: Path
    name: str
    format: str
    size: int
    mtime_ns: int
    required: bool
    fields: Fields | ExampleFields | AllFields = EITHER_FIELD
    rows: tuple[int, int] | None = None
    split: str | None = None
    revision: str | None = None
    options: str = "{}"


@dataclass(frozen=True, slots=True)
class Record:
    """A document, or a piece of one that is too long to be held: UTF-8 text, token ids `[n]`, or an example, whole.

    `is_first`: the document begins here. `ends`: it ends here, and is to be followed by the separator. `digest` is set
    on the first piece of several: the hash of the whole document, where `Reading` asks for it. `position`: where an
    example is, as in `Broken`, for what is found wrong with it only when it is encoded.
    """

    content: Content
    is_first: bool = True
    ends: bool = True
    digest: bytes | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """Records that cannot be used: how many, where the first is, and what is wrong with it.

    `position` is what the file's reader makes a place of (`Reader.place`); None for the whole file.
    """

    file: SourceFile
    position: int | None
    problem: str
    count: int = 1


@dataclass(frozen=True)
class Odd:
    """A record that is used although something about it is odd; `position` as that of a broken one."""

    file: SourceFile
    position: int | None
    problem: str


@dataclass(frozen=True)
class Span:
    """A part of a file, [start, stop) in the reader's own units, and its share of the file's bytes, for progress.

    Where only one process can find the way through a file, it hands out what it has read there: `data` still to be
    parsed, or the `records`. `ends`: the file ends here.
    """

    file: SourceFile
    start: int
    stop: int
    num_bytes: int
    ends: bool = False
    data: bytes | None = None
    records: tuple[Record | Broken, ...] | None = None


@dataclass(frozen=True)
class Reading:
    """How records are wanted. `separator` ends documents in a stream of ids; `digests`: hash long documents whole."""

    separator: int | None = None
    digests: bool = False


class Reader(ABC):
    """Knows one format: cuts its files into spans and reads the records of a span."""

    @abstractmethod
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        """Cut a file into spans of about `piece_bytes`, in order; nothing for an empty file.

        Raises DataError for a file named by the user that cannot be read; one of a folder becomes a broken record.
        """

    @abstractmethod
    def read(self, span: Span, reading: Reading) -> Iterator[Record | Broken]:
        """The records of a span that `cut` made, in order; empty documents are left out. Raises DataError."""

    def place(self, file: SourceFile, position: int) -> str:
        """Where a position is, for people. It may read the file."""
        return f"{file.path}, record {position}"

    def count(self, file: SourceFile, limit: int, reading: Reading) -> int:
        """How many documents a file holds, counted up to `limit` and no further."""
        count = 0
        for span in self.cut(file):
            count += sum(isinstance(each, Record) and each.is_first for each in read_span(self, span, reading))
            if count >= limit:
                break
        return min(count, limit)


def read_span(reader: Reader, span: Span, reading: Reading) -> Iterator[Record | Broken]:
    """The records of a span, whoever has read it."""
    return iter(span.records) if span.records is not None else reader.read(span, reading)


def broken_file(file: SourceFile, problem: str) -> Span:
    """The span of a file that cannot be read at all. Raises DataError where the user named that file."""
    if file.required:
        raise DataError(f"{file.path} {problem}.")
    return Span(file, 0, 0, file.size, True, records=(Broken(file, None, problem),))


def hash_for_split(content: Content) -> int:
    """A 64-bit hash of a document's first MiB, which decides its side of the validation split; of an example, whole."""
    if isinstance(content, np.ndarray):
        data = _serialize(content[: HASHED_BYTES // 4])
    else:
        data = content[:HASHED_BYTES] if isinstance(content, bytes) else _serialize_example(content)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=_SPLIT_KEY).digest(), "little")


def digest_document(pieces: Iterable[Content]) -> bytes:
    """A 128-bit keyed hash of a whole document, given in pieces. Text, ids and examples never have the same."""
    digest = None
    for piece in pieces:
        key, data = _IDS_KEY, b""
        if isinstance(piece, bytes):
            key, data = _TEXT_KEY, piece
        elif isinstance(piece, np.ndarray):
            data = _serialize(piece)
        else:
            key, data = _EXAMPLE_KEY, _serialize_example(piece)
        if digest is None:
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)
        digest.update(data)
    assert digest is not None, "a document has at least one piece"
    return digest.digest()


def content_bytes(content: Content) -> int:
    """The size of a record's text or ids in memory; of an example, as JSON."""
    if isinstance(content, np.ndarray):
        return content.nbytes
    return len(content) if isinstance(content, bytes) else len(_serialize_example(content))


def _serialize(ids: TokenIds) -> bytes:
    return ids.astype("<i8").tobytes()


def _serialize_example(example: Example) -> bytes:
    """An example as JSON with its keys in order; values that JSON has not, such as dates of a table, as text."""
    return json.dumps(example, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
