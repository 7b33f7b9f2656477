"""Comma- and tab-separated values: a document is a row: the text in one of its columns, or the example that several
make. The first row names them.

A line end inside quotes ends no row, so where rows begin is known only to who has read all before them.
"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from echelon.data.readers.compressed import DamagedStreamError, Decompressed, open_decompressed
from echelon.data.readers.record import (
    PIECE_BYTES,
    Broken,
    BrokenRecordError,
    Fields,
    Record,
    SourceFile,
    encode_text,
)
from echelon.data.readers.sequence import SequentialReader
from echelon.errors import DataError


class SeparatedReader(SequentialReader):
    """Rows as Python's `csv` module reads them: quotes doubled inside quotes, line ends allowed there.

    A position is the number of the line on which the row ends.
    """

    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """See SequentialReader. Raises DataError for a header without the column."""
        csv.field_size_limit(sys.maxsize)
        with open_decompressed(file) as stream:
            rows = csv.reader(_read_lines(stream), delimiter=_delimiter(file))
            try:
                columns = _find_columns(file, next(rows, []))
                for row in rows:
                    record = _parse(file, row, rows.line_num, columns)
                    if record is not None:
                        yield stream.consumed, record
            except (DamagedStreamError, csv.Error) as error:
                yield file.size, Broken(file, rows.line_num + 1, f"cannot be read ({error})")

    def place(self, file: SourceFile, position: int) -> str:
        """See Reader."""
        return f"{file.path}:{position}"


def read_header(file: SourceFile) -> list[str]:
    """The names of the columns; none where they cannot be read."""
    with open_decompressed(file) as stream:
        try:
            return next(csv.reader(_read_lines(stream), delimiter=_delimiter(file)), [])
        except (DamagedStreamError, csv.Error):
            return []


def _delimiter(file: SourceFile) -> str:
    return "\t" if ".tsv" in [suffix.lower() for suffix in file.path.suffixes] else ","


def _find_columns(file: SourceFile, header: list[str]) -> dict[str, int]:
    """The columns to read, by name. Ids are in no such table."""
    fields = replace(file.fields, tokens=None) if isinstance(file.fields, Fields) else file.fields
    columns = fields.columns(header)
    if not columns:
        wanted = fields if str(fields) else file.fields
        raise DataError(
            f"{file.path} has no column {wanted} to read text from; its first line names "
            f"{', '.join(header) or 'none'}: set {fields.fix} beside the path."
        )
    return {name: header.index(name) for name in columns}


def _parse(file: SourceFile, row: list[str], line: int, columns: dict[str, int]) -> Record | Broken | None:
    if not row:
        return None
    for name, column in columns.items():
        if len(row) <= column:
            return Broken(file, line, f"has only {len(row)} columns; `{name}` is the {column + 1}th")
    try:
        for name, column in columns.items():
            encode_text(row[column], name)
        content = file.fields.pick({name: row[column] for name, column in columns.items()})
    except BrokenRecordError as error:
        return Broken(file, line, str(error))
    return Record(content, position=line) if len(content) else None


def _read_lines(stream: Decompressed) -> Iterator[str]:
    """The lines with their ends. Bytes that are not UTF-8 become surrogates, which the row's text is refused for."""
    decoded = io.TextIOWrapper(cast(io.BytesIO, _Blocks(stream)), "utf-8-sig", "surrogateescape", newline="")
    yield from decoded


class _Blocks(io.RawIOBase):
    """A decompressed file as the standard library's text layer wants it."""

    def __init__(self, stream: Decompressed) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        return self._stream.read(size if size > 0 else PIECE_BYTES)
