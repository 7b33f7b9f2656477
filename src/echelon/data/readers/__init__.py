"""The formats that are read. A format is a file of this package and a row of the table in `recipe/names.py`.

`record` has what a reader works with and the protocol it fulfils; `compressed` and `sequence` what several share.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from echelon.data.readers.columns import ColumnReader, damages
from echelon.data.readers.compressed import COMPRESSIONS
from echelon.data.readers.megatron import is_megatron_index
from echelon.data.readers.record import (
    ALL_FIELDS,
    PIECE_BYTES,
    Broken,
    Odd,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    read_span,
)
from echelon.data.readers.separated import SeparatedReader, read_header
from echelon.extensions import build_named
from echelon.recipe.names import FORMATS

_BY_SUFFIX = {suffix: name for name, row in FORMATS.items() for suffix in row.suffixes}


def guess_format(path: Path) -> str | None:
    """The format a file's name tells, `.gz` and `.zst` aside; None for a suffix that no format has."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if compressed:
        suffixes.pop()
    found = _BY_SUFFIX.get(suffixes[-1]) if suffixes else None
    if found is None or (compressed and not FORMATS[found].compressible):
        return None
    if found == "nanogpt" and is_megatron_index(path.with_suffix(".idx")):
        return "megatron"
    return found


def find_reader(file: SourceFile, key: str = "data.train.format") -> Reader:
    """The reader of a file's format: one object for all files of a format with the same options.

    Raises ConfigError for one from outside that cannot be imported, is no Reader, or does not take the options; `key`
    is the recipe's.
    """
    return _build_reader(key, file.format, file.options)


@cache
def _build_reader(key: str, format: str, options: str) -> Reader:
    places = {name: row.place for name, row in FORMATS.items()}
    reader: Reader = build_named(key, format, places, Reader, options=json.loads(options))
    return reader


def cut_file(file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
    """The spans of a file. See Reader.cut."""
    return find_reader(file).cut(file, piece_bytes)


def read_records(span: Span, reading: Reading) -> Iterator[Record | Broken]:
    """The records of a span. See Reader.read."""
    return read_span(find_reader(span.file), span, reading)


def name_place(record: Broken | Odd) -> str:
    """Where a broken or an odd record is, for people: the file, and the line, row or record where there is one."""
    file = record.file
    return str(file.path) if record.position is None else find_reader(file).place(file, record.position)


def count_documents(files: Iterable[SourceFile], limit: int, reading: Reading) -> int:
    """How many documents the files hold, counted up to `limit` and no further."""
    count = 0
    for file in files:
        if count >= limit:
            break
        count += find_reader(file).count(file, limit - count, reading)
    return count


def field_names(file: SourceFile) -> tuple[str, ...]:
    """The names of the fields of a file of records: a table's columns, or what the first record has that can be read.

    Raises DataError for a file that cannot be opened; none for one that is damaged, which is found when it is read.
    """
    reader = find_reader(file)
    if not file.size and file.format != "hub":
        return ()
    if isinstance(reader, ColumnReader):
        try:
            return tuple(reader.columns(file.path))
        except damages():
            return ()
    if isinstance(reader, SeparatedReader):
        return tuple(read_header(file))
    for span in cut_file(replace(file, fields=ALL_FIELDS), 1):
        for found in read_records(span, Reading()):
            if isinstance(found, Record) and isinstance(found.content, Mapping):
                return tuple(found.content)
    return ()
