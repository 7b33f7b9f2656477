"""Readers of the data formats. `FORMATS` in `recipe/names.py` lists the formats and the reader class of each.

`record` defines the `Reader` interface and its types; `compressed` and `sequence` contain what several readers share.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from echelon.ground.errors import EchelonError
from echelon.ground.extensions import build_named
from echelon.learn.data.readers.columns import ColumnReader, damages
from echelon.learn.data.readers.compressed import COMPRESSIONS
from echelon.learn.data.readers.megatron import is_megatron_index
from echelon.learn.data.readers.record import (
    PIECE_BYTES,
    Broken,
    Fields,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    read_span,
)
from echelon.learn.data.readers.separated import SeparatedReader, read_header
from echelon.recipe.names import FORMATS

HOPELESS_RECORDS = 1000
"""A source is refused without reading further if none of its first records, this many, can be used."""

_SAMPLE_BYTES = 2**14

_Found = TypeVar("_Found")

_BY_SUFFIX = {suffix: name for name, row in FORMATS.items() for suffix in row.suffixes}


def guess_format(path: Path) -> str | None:
    """Guess a file's format from its name, ignoring `.gz` and `.zst`; None if no format matches."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if compressed:
        suffixes.pop()
    form = _BY_SUFFIX.get(suffixes[-1]) if suffixes else None
    if form is None or (compressed and not FORMATS[form].compressible):
        return None
    if form == "nanogpt" and is_megatron_index(path.with_suffix(".idx")):
        return "megatron"
    return form


def find_reader(file: SourceFile, key: str = "data.train.format") -> Reader:
    """Return the reader of a file's format. Files with the same format and options share one reader.

    Raises ConfigError, naming the recipe key `key`, for a custom reader that cannot be imported, is not a Reader or
    rejects the options.
    """
    return _build_reader(key, file.format, file.options)


@cache
def _build_reader(key: str, format: str, options: str) -> Reader:
    places = {name: row.place for name, row in FORMATS.items()}
    reader: Reader = build_named(key, format, places, Reader, options=json.loads(options))
    return reader


def cut_file(file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
    """Cut a file into spans. See Reader.cut. Raises EchelonError, naming the file, if the disk fails."""
    return _failures_told(file, find_reader(file).cut(file, piece_bytes))


def read_records(span: Span, reading: Reading) -> Iterator[Record | Broken]:
    """Read the records of a span. See Reader.read. Raises EchelonError, naming the file, if the disk fails."""
    return _failures_told(span.file, read_span(find_reader(span.file), span, reading))


def _failures_told(file: SourceFile, found: Iterator[_Found]) -> Iterator[_Found]:
    try:
        yield from found
    except OSError as error:
        raise EchelonError(f"{file.path} cannot be read ({error}); run the same command again to go on.") from error


def name_place(record: Broken) -> str:
    """Describe the location of a broken record: the file and, if known, the line, row or record number."""
    file = record.file
    return str(file.path) if record.position is None else find_reader(file).place(file, record.position)


def count_documents(files: Iterable[SourceFile], limit: int, reading: Reading) -> int:
    """Count the documents in the files, stopping at `limit`."""
    count = 0
    for file in files:
        if count >= limit:
            break
        count += find_reader(file).count(file, limit - count, reading)
    return count


def field_names(file: SourceFile) -> tuple[str, ...]:
    """Return the field names of a file: the columns of a table, or the fields of its first readable record.

    Returns none for a damaged file, or one without a readable record among the first HOPELESS_RECORDS; reading it
    reports the damage. Raises DataError for a file that cannot be opened.
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
    num_broken = 0
    for span in cut_file(replace(file, fields=Fields()), _SAMPLE_BYTES):
        for record in read_records(span, Reading()):
            if isinstance(record, Record) and isinstance(record.content, Mapping):
                return tuple(record.content)
            num_broken += isinstance(record, Broken)
            if num_broken == HOPELESS_RECORDS:
                return ()
    return ()
