"""Parquet and Arrow files. A document is a row: the text or the ids in one column, or an example in several columns.

Spans are ranges of rows, planned from the files' metadata. A process that reads consecutive spans continues where it
stopped. It keeps one batch of rows in memory, never a row group or a file.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.learn.data.readers.compressed import import_pyarrow
from echelon.learn.data.readers.record import (
    PIECE_BYTES,
    Broken,
    BrokenRecordError,
    Fields,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    broken_file,
    parse_ids,
)
from echelon.recipe.data_formats import describe_formats

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Block:
    """Rows that the file stores together (a row group or a record batch): first row, number of rows, size in bytes."""

    start: int
    num_rows: int
    num_bytes: int


class ColumnReader(Reader):
    """The common part of the Parquet and Arrow readers. A position is a row number, from 0."""

    @abstractmethod
    def blocks(self, file: SourceFile) -> Iterator[Block]:
        """Yield the blocks of a file in order. Raises pyarrow's errors for a damaged file."""

    @abstractmethod
    def batches(self, path: Path, columns: tuple[str, ...], start: int) -> Iterator[tuple[int, Any]]:
        """Yield (first row, record batch) for the given columns, from the block that contains row `start` on."""

    @abstractmethod
    def columns(self, path: Path) -> list[str]:
        """Return the column names."""

    @override
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        """Raises DataError if a needed column is missing."""
        first, last = file.rows or (0, 2**63)
        try:
            if file.size and find_columns(file, self.columns(file.path)):
                for block in self.blocks(file):
                    yield from _cut_block(file, block, first, last, piece_bytes)
        except damages() as error:
            yield broken_file(file, f"is not a readable {file.format} file ({_one_line(error)})")

    @override
    def read(self, span: Span, reading: Reading) -> Iterator[Record | Broken]:
        """After a read error, all remaining rows of the span count as broken."""
        file = span.file
        columns = find_columns(file, self.columns(file.path))
        row = span.start
        try:
            for start, batch in _cursor.rows(self, file.path, columns, span.start, span.stop):
                for index, record in enumerate(_parse(file, batch, start), start):
                    row = index + 1
                    if isinstance(record, str):
                        yield Broken(file, index, record)
                    elif record is not None:
                        yield record
        except damages() as error:
            _cursor.close()
            yield Broken(file, row, f"cannot be read ({_one_line(error)})", span.stop - row)

    @override
    def place(self, file: SourceFile, position: int) -> str:
        return f"{file.path}, row {position}"


class ParquetReader(ColumnReader):
    """Parquet files. A block is a row group."""

    @override
    def columns(self, path: Path) -> list[str]:
        return list(_pyarrow_parquet().ParquetFile(path).schema_arrow.names)

    @override
    def blocks(self, file: SourceFile) -> Iterator[Block]:
        """The row groups."""
        start = 0
        with _pyarrow_parquet().ParquetFile(file.path) as parquet:
            for index in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(index)
                yield Block(start, group.num_rows, group.total_byte_size)
                start += group.num_rows

    @override
    def batches(self, path: Path, columns: tuple[str, ...], start: int) -> Iterator[tuple[int, Any]]:
        with _pyarrow_parquet().ParquetFile(path, memory_map=False, pre_buffer=False) as parquet:
            row = 0
            # One group at a time: a damaged group would otherwise lose a batch that spans several groups.
            for index in range(parquet.num_row_groups):
                stop = row + parquet.metadata.row_group(index).num_rows
                if stop > start:
                    chosen = {"row_groups": [index], "columns": list(columns), "use_threads": False}
                    for batch in parquet.iter_batches(_BATCH_ROWS, **chosen):
                        yield row, batch
                        row += batch.num_rows
                row = stop


class ArrowReader(ColumnReader):
    """Arrow IPC files: the file format (also Feather) and the stream format, which `save_to_disk` writes."""

    @override
    def columns(self, path: Path) -> list[str]:
        with _open_arrow(path) as (schema, _):
            return list(schema.names)

    @override
    def blocks(self, file: SourceFile) -> Iterator[Block]:
        """The record batches."""
        start = 0
        with _open_arrow(file.path) as (_, batches):
            for batch in batches:
                batch.validate()  # the size is that of what the offsets in it refer to
                yield Block(start, batch.num_rows, batch.nbytes)
                start += batch.num_rows

    @override
    def batches(self, path: Path, columns: tuple[str, ...], start: int) -> Iterator[tuple[int, Any]]:
        """Batches before `start` are skipped without being read, unless they are compressed."""
        row = 0
        with _open_arrow(path) as (_, batches):
            for batch in batches:
                if row + batch.num_rows > start:
                    chosen = batch.select(list(columns))
                    _check_offsets(chosen)
                    yield row, chosen
                row += batch.num_rows


class _Cursor:
    """The current position of this process in a table. Spans are in order, so each usually continues the last one."""

    def __init__(self) -> None:
        self._key: tuple[Path, tuple[str, ...]] | None = None
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._current: tuple[int, Any] | None = None

    def rows(
        self, reader: ColumnReader, path: Path, columns: tuple[str, ...], start: int, stop: int
    ) -> Iterator[tuple[int, Any]]:
        """Yield (first row, record batch) for the rows [start, stop)."""
        if self._key != (path, columns) or self._current is None or start < self._current[0]:
            self._key, self._batches = (path, columns), reader.batches(path, columns, start)
            self._current = next(self._batches, None)
        while self._current is not None:
            first, batch = self._current
            if first >= stop:
                return
            if first + batch.num_rows > start:
                low, high = max(start - first, 0), min(stop - first, batch.num_rows)
                yield first + low, batch.slice(low, high - low)
                if stop <= first + batch.num_rows:
                    return
            self._current = next(self._batches, None)

    def close(self) -> None:
        """Reset the position, for example after an error."""
        self._key, self._batches, self._current = None, iter(()), None


_cursor = _Cursor()


def find_columns(file: SourceFile, names: list[str]) -> tuple[str, ...]:
    """Return the columns to read. Raises DataError if a needed column is missing."""
    if not (columns := file.fields.columns(names)):
        raise DataError(
            f"{file.path} has no column {file.fields}; its columns are {', '.join(names)}. Set {file.fields.fix} next "
            f"to the path ({describe_formats()})."
        )
    return columns


def _cut_block(file: SourceFile, block: Block, first: int, last: int, piece_bytes: int) -> Iterator[Span]:
    row_bytes = max(1, block.num_bytes // max(1, block.num_rows))
    rows = max(1, piece_bytes // row_bytes)
    start, end = max(block.start, first), min(block.start + block.num_rows, last)
    while start < end:
        stop = min(start + rows, end)
        yield Span(file, start, stop, (stop - start) * row_bytes)
        start = stop


def _parse(file: SourceFile, batch: Any, start: int) -> Iterator[Record | str | None]:
    """Yield for each row its record, None if it is empty, or a description of the problem."""
    if file.fields.format is not None:
        yield from (_parse_example(file.fields, batch.slice(row, 1), start + row) for row in range(batch.num_rows))
        return
    pa = _pyarrow()
    values, column = batch.column(0), batch.schema.names[0]
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # As bytes, so that a row that is not UTF-8 is reported by itself.
        yield from map(
            _parse_text, values.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()).to_pylist()
        )
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        for scalar in values:
            yield _parse_row(scalar, column)
    else:
        raise DataError(
            f"{file.path}: the column `{column}` has type {kind}; it must contain text or lists of token ids."
        )


def _parse_example(fields: Fields, row: Any, position: int) -> Record | str:
    try:
        return Record(fields.pick(drop_nulls(row.to_pylist()[0])), position=position)
    except BrokenRecordError as error:
        return str(error)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text ({error.reason})"
    except (ValueError, OverflowError, KeyError) as error:  # a time that Python does not have, an unknown time zone
        return f"cannot be read ({_one_line(error)})"


def _parse_text(value: bytes | None) -> Record | str | None:
    if value is None:
        return "has no text"
    try:
        value.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text ({error.reason})"
    return Record(value) if value else None


def _parse_row(scalar: Any, column: str) -> Record | str | None:
    if not scalar.is_valid:
        return f"has no list of token ids in `{column}`"
    try:
        ids = parse_ids(scalar.values.to_numpy(zero_copy_only=False), column)
    except BrokenRecordError as error:
        return str(error)
    return Record(ids) if ids.size else None


def drop_nulls(value: Any) -> Any:
    """Remove the null fields from a value. In a table, every record has all fields, also those it does not use."""
    if isinstance(value, dict):
        return {key: drop_nulls(part) for key, part in value.items() if part is not None}
    is_nested = isinstance(value, list) and value and isinstance(value[0], dict | list)
    return [drop_nulls(part) for part in value] if is_nested else value


def _check_offsets(batch: Any) -> None:
    """Raise pyarrow's error for values outside of a batch, which would be read from any memory, or crash.

    Texts are checked as bytes: one that is not UTF-8 is a broken record, and not a damaged batch.
    """
    for column in batch.columns:
        column.view(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: Any) -> Any:
    """A type with bytes instead of texts, also inside."""
    pa = _pyarrow()
    of = pa.types
    if of.is_string(kind) or of.is_large_string(kind):
        return pa.binary() if of.is_string(kind) else pa.large_binary()
    if of.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if of.is_list(kind) or of.is_large_list(kind):
        make = pa.list_ if of.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return kind


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Open either IPC format: the schema and the record batches. Memory-mapped: a batch is read when accessed."""
    pa = _pyarrow()
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            reader: Any = pa.ipc.open_file(source)
            read: Callable[[int], Any] = reader.get_batch
            yield reader.schema, map(read, range(reader.num_record_batches))
        else:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            yield reader.schema, iter(reader)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def damages() -> tuple[type[Exception], ...]:
    """The exceptions that pyarrow raises for a file that is damaged or in another format."""
    return (_pyarrow().ArrowException, OSError, UnicodeDecodeError)


def _pyarrow() -> Any:
    return import_pyarrow("a parquet or arrow file")


def _pyarrow_parquet() -> Any:
    _pyarrow()
    import pyarrow.parquet

    return pyarrow.parquet
