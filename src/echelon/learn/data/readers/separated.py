"""Comma- and tab-separated values. A document is a row: the text in one column, or an example in several columns.

The first row names the columns. A line end inside quotes does not end a row, so the start of a row is known only after
reading everything before it.
"""

import csv
import io
import sys
from collections.abc import Iterator
from typing import cast

from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.ground.sizes import render_bytes
from echelon.learn.data.readers.compressed import DamagedStreamError, Decompressed, open_decompressed
from echelon.learn.data.readers.record import (
    MAX_RECORD_BYTES,
    PIECE_BYTES,
    Broken,
    BrokenRecordError,
    Record,
    SourceFile,
    encode_text,
    parse_record,
)
from echelon.learn.data.readers.sequence import SequentialReader
from echelon.recipe.data_formats import describe_formats


class SeparatedReader(SequentialReader):
    """Read rows with Python's `csv` module: inside quotes, a quote is doubled and line ends are allowed.

    A position is the number of the line on which the row ends.
    """

    @override
    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """Raises DataError if a needed column is missing."""
        csv.field_size_limit(sys.maxsize)
        with open_decompressed(file) as stream:
            lines = _RowLines(_read_lines(stream))
            rows = csv.reader(lines, delimiter=_delimiter(file))
            try:
                columns = _find_columns(file, next(rows, []))
                lines.forget()
                for row in rows:
                    record = lines.find_fault(file, rows.line_num) or _parse(file, row, rows.line_num, columns)
                    lines.forget()
                    if record is not None:
                        yield stream.consumed, record
            except (DamagedStreamError, csv.Error) as error:
                yield file.size, Broken(file, rows.line_num + 1, f"cannot be read ({error})")

    @override
    def place(self, file: SourceFile, position: int) -> str:
        return f"{file.path}:{position}"


class _RowLines:
    """Iterate over the lines of a table and keep the lines of the current row.

    A quote that is not closed or not doubled merges all lines up to the next quote into one row, which `csv` reads as
    the text of a field. Only the strict mode of `csv` reports this, but it also rejects harmless rows of one line.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._row: list[str] = []
        self._size = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._row.append(line)
        self._size += len(line)
        if self._size >= MAX_RECORD_BYTES:
            raise csv.Error(f"a row is longer than {render_bytes(MAX_RECORD_BYTES)}")
        return line

    def forget(self) -> None:
        """Drop the kept lines: a new row starts."""
        self._row.clear()
        self._size = 0

    def find_fault(self, file: SourceFile, last_line: int) -> Broken | None:
        """Check the quotes of the row that ends on this line. Each line of a faulty row counts as a broken record."""
        count = len(self._row)
        if count == 1 and self._row[0].count('"') % 2 == 0:
            return None
        try:
            list(csv.reader(self._row, delimiter=_delimiter(file), strict=True))
        except csv.Error as error:
            is_open = "unexpected end of data" in str(error)
            if count == 1 and not is_open:
                return None
            fault = (
                "opens a quote that is never closed" if is_open else "has a quote that is neither closed nor doubled"
            )
            swallowed = f", so that {count:,} lines up to line {last_line:,} became one row" if count > 1 else ""
            return Broken(file, last_line - count + 1, f"{fault}{swallowed}", count)
        return None


def read_header(file: SourceFile) -> list[str]:
    """Return the column names; none if they cannot be read."""
    with open_decompressed(file) as stream:
        try:
            return next(csv.reader(_read_lines(stream), delimiter=_delimiter(file)), [])
        except (DamagedStreamError, csv.Error):
            return []


def _delimiter(file: SourceFile) -> str:
    return "\t" if ".tsv" in [suffix.lower() for suffix in file.path.suffixes] else ","


def _find_columns(file: SourceFile, header: list[str]) -> dict[str, int]:
    """Map the names of the columns to read to their indices. Such tables cannot contain lists of ids."""
    fields = file.fields.without_ids()
    if fields is None or not (columns := fields.columns(header)):
        raise DataError(
            f"{file.path} has no column {fields or file.fields} to read text from; its first line names "
            f"{', '.join(header) or 'no columns'}. Set {file.fields.fix} next to the path ({describe_formats()})."
        )
    return {name: header.index(name) for name in columns}


def _parse(file: SourceFile, row: list[str], line: int, columns: dict[str, int]) -> Record | Broken | None:
    if not row:
        return None
    for name, column in columns.items():
        if len(row) <= column:
            return Broken(file, line, f"has only {len(row)} columns; `{name}` is column {column + 1}")
    values = {name: row[column] for name, column in columns.items()}
    try:
        for name, value in values.items():
            encode_text(value, name)
    except BrokenRecordError as error:
        return Broken(file, line, str(error))
    return parse_record(file, line, values)


def _read_lines(stream: Decompressed) -> Iterator[str]:
    """Yield the lines with their line ends. Bytes that are not UTF-8 become surrogates; `_parse` reports such rows."""
    decoded = io.TextIOWrapper(cast(io.BytesIO, _Blocks(stream)), "utf-8-sig", "surrogateescape", newline="")
    while line := decoded.readline(MAX_RECORD_BYTES):
        yield line


class _Blocks(io.RawIOBase):
    """Adapt a decompressed file to the interface that `io.TextIOWrapper` needs."""

    def __init__(self, stream: Decompressed) -> None:
        self._stream = stream

    @override
    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        return self._stream.read(size if size > 0 else PIECE_BYTES)
