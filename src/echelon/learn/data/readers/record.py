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
from echelon.recipe.data_formats import PLAIN_FIELDS, RECORD_FORMATS, WHOLE_RECORD

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

STORED = {"text": "text", "tokens": "input_ids"}
_SPLIT_KEY = b"echelon validation 1"
_TEXT_KEY = b"echelon document text 1"
_IDS_KEY = b"echelon document ids 1"
_EXAMPLE_KEY = b"echelon document example 1"


class BrokenRecordError(Exception):
    """A record cannot be used. The message describes the problem and is appended to the record's location."""


@dataclass(frozen=True)
class Fields:
    """The fields to read of a record: those of an instruction format, or its text or token ids, or all.

    `format`: the instruction format; None: the first of the fields in `names` that the record has is read, and without
    any name the whole record. `names`: pairs (name in the format, name in the records); of an instruction format only
    those that differ, for fields of the record and of its turns.
    """

    format: str | None = None
    names: tuple[tuple[str, str], ...] = ()

    @override
    def __str__(self) -> str:
        """The required field names for messages."""
        if self.format is None:
            return " or ".join(f"`{theirs}`" for _, theirs in self.names)
        return " and ".join(f"`{self._name(field)}`" for field in RECORD_FORMATS[self.format].required)

    @property
    def fix(self) -> str:
        """The recipe entry that fixes a file whose first required field has another name."""
        first = PLAIN_FIELDS[0] if self.format is None else RECORD_FORMATS[self.format].required[0]
        return f"fields: {{{first}: NAME}}"

    def to_stored(self) -> dict[str, Any]:
        """The fields as files of prepared data have them: those of plain text by what they hold."""
        plain = {kind: dict(self.names).get(name) for kind, name in STORED.items()}
        return plain if self.format is None else {"format": self.format, "names": self.names}

    def without_ids(self) -> "Fields | None":
        """The same fields where no field has token ids; None if there are no others."""
        if self.format is not None:
            return self
        names = tuple((ours, theirs) for ours, theirs in self.names if ours != "input_ids")
        return Fields(names=names) if names else None

    def columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """Choose the columns to read from the columns of a table; none if a needed column is missing."""
        columns = tuple(names)
        if self.format is None:
            return tuple(theirs for _, theirs in self.names if theirs in columns)[:1] if self.names else columns
        row = RECORD_FORMATS[self.format]
        if not all(self._name(field) in columns for field in row.required):
            return ()
        if row.keeps_record:
            return columns
        return tuple(self._name(field) for field in row.fields if self._name(field) in columns)

    def pick(self, record: Any) -> Content:
        """Return the text of a record as UTF-8, its ids, or an example. Raises BrokenRecordError."""
        if not isinstance(record, Mapping):
            raise BrokenRecordError("is not a JSON object")
        if self.format is not None:
            return self._pick_example(self.format, record)
        if not self.names:
            return record
        for ours, theirs in self.names:
            if theirs in record:
                return (encode_text if ours == "text" else parse_ids)(record[theirs], theirs)
        raise BrokenRecordError(f"has no field {self}; set `{self.fix}` next to the path")

    def _pick_example(self, format: str, record: Example) -> Example:
        """Return the format's fields of a record, by the format's names, without null values.

        Raises BrokenRecordError for a record without a required field.
        """
        row = RECORD_FORMATS[format]
        values = {field: record.get(self._name(field)) for field in row.fields}
        if row.keeps_record:
            values[WHOLE_RECORD] = dict(record)
        for field in row.required:
            if values[field] is None:
                raise BrokenRecordError(f"has no field `{self._name(field)}`, which the format {format} requires")
        turn_names = {theirs: ours for ours, theirs in self.names if ours in row.turn_fields}
        return {
            field: _rename_turns(value, turn_names) if turn_names and field in row.turns else value
            for field, value in values.items()
            if value is not None
        }

    def _name(self, field: str) -> str:
        return next((theirs for ours, theirs in self.names if ours == field), field)


EITHER_FIELD = Fields(names=tuple((name, name) for name in PLAIN_FIELDS))
"""The fields that are read if the recipe names none: text, or token ids."""


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
    fields: Fields = EITHER_FIELD
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
    """Records that cannot be used, or one that is odd: their number, the position of the first, and the problem.

    The file's reader describes `position` with `Reader.place`; None for the whole file.
    """

    file: SourceFile
    position: int | None
    problem: str
    count: int = 1


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


def parse_record(file: SourceFile, position: int, value: Any) -> Record | Broken | None:
    """Return the document of a record at a position of a file; None if it has no text."""
    try:
        content = file.fields.pick(value)
    except BrokenRecordError as error:
        return Broken(file, position, str(error))
    return Record(content, position=position) if len(content) else None


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
