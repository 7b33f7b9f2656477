"""The types that readers work with: files of a source, spans of a file, records of a span, and the `Reader` interface.

A *document* is the unit that the separator follows, and the unit of the validation split and of deduplication: a text
file, a line of .jsonl, a row of a table, a run of ids up to the separator. A *span* is a part of a file that any
process can read by itself. Spans depend only on the files, so the tokens are the same for any number of processes.
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
from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.recipe.data_formats import RECORD_FORMATS, WHOLE_RECORD

PIECE_BYTES = 2**20
"""The approximate size of a span in bytes, and its minimum, except for the last span of a file."""

MAX_RECORD_BYTES = 2**30
"""A longer line, row, element or sample of a file that may be compressed is broken. It would be held in memory."""

HASHED_BYTES = PIECE_BYTES
"""The validation split hashes at most this many bytes from the start of a document."""

DIGEST_BYTES = 16

TokenIds = npt.NDArray[np.integer[Any]]

Example = Mapping[str, Any]
"""A record of an instruction format: the values of its fields, by the format's own field names."""

Content = bytes | TokenIds | Example

_SPLIT_KEY = b"echelon validation 1"
_TEXT_KEY = b"echelon document text 1"
_IDS_KEY = b"echelon document ids 1"
_EXAMPLE_KEY = b"echelon document example 1"


class BrokenRecordError(Exception):
    """A record cannot be used. The message describes the problem and is appended to the record's location."""


@dataclass(frozen=True)
class Fields:
    """The fields with a record's text and token ids. If both are given, the text is used if the record has it."""

    text: str | None = "text"
    tokens: str | None = "input_ids"

    @override
    def __str__(self) -> str:
        """The field names for messages."""
        return " or ".join(f"`{name}`" for name in (self.text, self.tokens) if name is not None)

    @property
    def fix(self) -> str:
        """The recipe entry that fixes a file without any of these fields."""
        return "fields: {text: NAME}"

    def choose(self, names: Iterable[str]) -> str | None:
        """Choose the field to read from the fields of a record; None if it has neither."""
        present = set(names)
        return next((name for name in (self.text, self.tokens) if name is not None and name in present), None)

    def columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """Choose the columns to read from the columns of a table; none if a needed column is missing."""
        name = self.choose(names)
        return () if name is None else (name,)

    def pick(self, record: Any) -> Content:
        """Return the text of a record as UTF-8, or its ids. Raises BrokenRecordError."""
        if not isinstance(record, Mapping):
            raise BrokenRecordError("is not a JSON object")
        if (name := self.choose(record)) is None:
            raise BrokenRecordError(f"has no field {self}; set `fields: {{text: NAME}}` next to the path")
        return encode_text(record[name], name) if name == self.text else parse_ids(record[name], name)


EITHER_FIELD = Fields()
"""The fields that are read if the recipe names none."""


@dataclass(frozen=True)
class ExampleFields:
    """The fields of records of an instruction format: the format, and the field names that differ from its own.

    `names` has pairs (name in the format, name in the records), for fields of the record and of its turns.
    """

    format: str
    names: tuple[tuple[str, str], ...] = ()

    @override
    def __str__(self) -> str:
        """The required field names for messages."""
        return " and ".join(f"`{self._name(field)}`" for field in RECORD_FORMATS[self.format].required)

    @property
    def fix(self) -> str:
        """The recipe entry that fixes a file whose first required field has another name."""
        return f"fields: {{{RECORD_FORMATS[self.format].required[0]}: NAME}}"

    def columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """Choose the columns to read from the columns of a table; none if a required column is missing."""
        present, row = set(names), RECORD_FORMATS[self.format]
        if not all(self._name(field) in present for field in row.required):
            return ()
        if row.keeps_record:
            return tuple(names)
        return tuple(self._name(field) for field in row.fields if self._name(field) in present)

    def pick(self, record: Any) -> Content:
        """Return the format's fields of a record, by the format's names, without null values.

        Raises BrokenRecordError for a record without a required field.
        """
        if not isinstance(record, Mapping):
            raise BrokenRecordError("is not a JSON object")
        row = RECORD_FORMATS[self.format]
        values = {field: record.get(self._name(field)) for field in row.fields}
        if row.keeps_record:
            values[WHOLE_RECORD] = dict(record)
        for field in row.required:
            if values[field] is None:
                raise BrokenRecordError(f"has no field `{self._name(field)}`, which the format {self.format} requires")
        turn_names = {theirs: ours for ours, theirs in self.names if ours in row.turn_fields}
        return {
            field: _rename_turns(value, turn_names) if turn_names and field in row.turns else value
            for field, value in values.items()
            if value is not None
        }

    def _name(self, field: str) -> str:
        return next((theirs for ours, theirs in self.names if ours == field), field)


class AllFields:
    """All fields of a record, to inspect which fields it has."""

    fix = ""

    def columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """Choose all columns."""
        return tuple(names)

    def pick(self, record: Any) -> Content:
        """Return the whole record. Raises BrokenRecordError if it is not an object."""
        if not isinstance(record, Mapping):
            raise BrokenRecordError("is not a JSON object")
        return record


ALL_FIELDS = AllFields()


def _rename_turns(value: Any, names: Mapping[str, str]) -> Any:
    """Rename the fields of a turn or a list of turns. Other values are returned unchanged; encoding rejects them."""
    if isinstance(value, Mapping):
        return _rename_turns([value], names)[0]
    if not isinstance(value, list):
        return value
    return [
        {names.get(key, key): value for key, value in turn.items()} if isinstance(turn, Mapping) else turn
        for turn in value
    ]


def encode_text(value: object, name: str) -> bytes:
    """Encode a field's text as UTF-8. Raises BrokenRecordError for a value that is not text."""
    if not isinstance(value, str):
        raise BrokenRecordError(f"has no text in `{name}`")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BrokenRecordError(f"has text that is not UTF-8 in `{name}` ({error.reason})") from error


def parse_ids(value: object, name: str) -> TokenIds:
    """Parse a field's token ids `[n]`. Raises BrokenRecordError for a value that is not a list of integers."""
    try:
        ids = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise BrokenRecordError(f"has no list of token ids in `{name}`") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BrokenRecordError(f"has no list of token ids in `{name}`")
    return ids if ids.size else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, as it was when listed.

    `format` is a name in `FORMATS`, or the import path of a custom reader. `required`: the user named this file, so it
    cannot be skipped. `rows`: the range of records that a split selects; None for all. `split` and `revision` select
    from a streamed dataset. `options`: the arguments of a custom reader, as JSON.
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
    """A document, or a piece of a long document: UTF-8 text, token ids `[n]`, or an example (always whole).

    `is_first`: the document starts here. `ends`: it ends here and the separator must follow. `digest`: the hash of the
    whole document, set on the first of several pieces if `Reading` requests it. `position`: the position of an example,
    as in `Broken`, for problems that are found only when it is encoded.
    """

    content: Content
    is_first: bool = True
    ends: bool = True
    digest: bytes | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """Records that cannot be used: their number, the position of the first, and the problem.

    The file's reader describes `position` with `Reader.place`; None for the whole file.
    """

    file: SourceFile
    position: int | None
    problem: str
    count: int = 1


@dataclass(frozen=True)
class Odd:
    """A record that is used although it has an oddity. `position` as in `Broken`."""

    file: SourceFile
    position: int | None
    problem: str


@dataclass(frozen=True)
class Span:
    """A part of a file, [start, stop) in the reader's own units, and its share of the file's bytes, for progress.

    If only one process can read the file, the span carries what that process has read: `data`, still to be parsed, or
    the `records`. `ends`: the file ends here.
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
    """Options of reading. `separator` ends documents in a stream of ids; `digests`: hash long documents as a whole."""

    separator: int | None = None
    digests: bool = False


class Reader(ABC):
    """The reader of one format: cuts files into spans and reads the records of a span."""

    @abstractmethod
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        """Cut a file into spans of about `piece_bytes` bytes, in order; none for an empty file.

        Raises DataError for an unreadable file that the user named. An unreadable file of a folder becomes a broken
        record.
        """

    @abstractmethod
    def read(self, span: Span, reading: Reading) -> Iterator[Record | Broken]:
        """Read the records of a span from `cut`, in order, without empty documents. Raises DataError."""

    def place(self, file: SourceFile, position: int) -> str:
        """Describe a position for messages. It may read the file."""
        return f"{file.path}, record {position}"

    def count(self, file: SourceFile, limit: int, reading: Reading) -> int:
        """Count the documents in a file, stopping at `limit`."""
        count = 0
        for span in self.cut(file):
            count += sum(isinstance(record, Record) and record.is_first for record in read_span(self, span, reading))
            if count >= limit:
                break
        return min(count, limit)


def read_span(reader: Reader, span: Span, reading: Reading) -> Iterator[Record | Broken]:
    """Return the records that a span carries, or read them."""
    return iter(span.records) if span.records is not None else reader.read(span, reading)


def broken_file(file: SourceFile, problem: str) -> Span:
    """Return the span of a file that cannot be read at all. Raises DataError if the user named the file."""
    if file.required:
        raise DataError(f"{file.path} {problem}.")
    return Span(file, 0, 0, file.size, True, records=(Broken(file, None, problem),))


def hash_for_split(content: Content) -> int:
    """Hash a document's first MiB, or a whole example, to 64 bits. The hash assigns it to training or validation."""
    if isinstance(content, np.ndarray):
        data = _serialize(content[: HASHED_BYTES // 4])
    else:
        data = content[:HASHED_BYTES] if isinstance(content, bytes) else serialize_example(content)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=_SPLIT_KEY).digest(), "little")


def digest_document(pieces: Iterable[Content]) -> bytes:
    """Hash a whole document, given in pieces, to 128 bits. Text, ids and examples use different keys."""
    digest = None
    for piece in pieces:
        key, data = _IDS_KEY, b""
        if isinstance(piece, bytes):
            key, data = _TEXT_KEY, piece
        elif isinstance(piece, np.ndarray):
            data = _serialize(piece)
        else:
            key, data = _EXAMPLE_KEY, serialize_example(piece)
        if digest is None:
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)
        digest.update(data)
    assert digest is not None, "a document has at least one piece"
    return digest.digest()


def content_bytes(content: Content) -> int:
    """The size of a record in bytes: of text or ids in memory, of an example as JSON."""
    if isinstance(content, np.ndarray):
        return content.nbytes
    return len(content) if isinstance(content, bytes) else len(serialize_example(content))


def _serialize(ids: TokenIds) -> bytes:
    return ids.astype("<i8").tobytes()


def serialize_example(example: Example) -> bytes:
    """Serialize an example as JSON with sorted keys; values without a JSON type, such as dates, become text."""
    return json.dumps(example, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
