"""Parquet and Arrow files: a document is a row: the text or the ids in one of its columns, or the example that several
of them make.

Spans are ranges of rows, planned from what the files say of themselves. A process that reads the span after one it has
read before goes on where it was; it holds a batch of rows, never a row group or a file.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.data.readers.record import (
    PIECE_BYTES,
    Broken,
    BrokenRecordError,
    ExampleFields,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    broken_file,
    parse_ids,
)
from echelon.errors import ConfigError, DataError
from echelon.recipe.data_formats import describe_formats

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Block:
    """Rows that the file keeps together, from `start` on, and the bytes they take."""

    start: int
    num_rows: int
    num_bytes: int


class ColumnReader(Reader):
    """What Parquet and Arrow share. A position is the number of the row, from 0."""

    @abstractmethod
    def blocks(self, file: SourceFile) -> Iterator[Block]:
        """The blocks of a file in order. Raises what pyarrow raises for a file that is damaged."""

    @abstractmethod
    def batches(self, path: Path, columns: tuple[str, ...], start: int) -> Iterator[tuple[int, Any]]:
        """Record batches of some columns with the row each begins at, from the block of row `start` on."""

    @abstractmethod
    def columns(self, path: Path) -> list[str]:
        """The names of the columns."""

    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        """See Reader. Raises DataError for a file without the column."""
        first, last = file.rows or (0, 2**63)
        try:
            if file.size and find_columns(file, self.columns(file.path)):
                for block in self.blocks(file):
                    yield from _cut_block(file, block, first, last, piece_bytes)
        except damages() as error:
            yield broken_file(file, f"is no readable {file.format} file ({_one_line(error)})")

    def read(self, span: Span, reading: Reading) -> Iterator[Record | Broken]:
        """See Reader. What a block has that cannot be read is broken from there to the end of the span."""
        file = span.file
        columns = find_columns(file, self.columns(file.path))
        row = span.start
        try:
            for start, batch in _cursor.rows(self, file.path, columns, span.start, span.stop):
                for index, found in enumerate(_parse(file, batch, start), start):
                    row = index + 1
                    if isinstance(found, str):
                        yield Broken(file, index, found)
                    elif found is not None:
                        yield found
        except damages() as error:
            _cursor.close()
            yield Broken(file, row, f"cannot be read ({_one_line(error)})", span.stop - row)

    def place(self, file: SourceFile, position: int) -> str:
        """See Reader."""
        return f"{file.path}, row {position}"


class ParquetReader(ColumnReader):
    """Parquet, by row groups and the pages in them."""

    def columns(self, path: Path) -> list[str]:
        """See ColumnReader."""
        return list(_pyarrow_parquet().ParquetFile(path).schema_arrow.names)

    def blocks(self, file: SourceFile) -> Iterator[Block]:
        """See ColumnReader: the row groups."""
        start = 0
        with _pyarrow_parquet().ParquetFile(file.path) as parquet:
            for index in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(index)
                yield Block(start, group.num_rows, group.total_byte_size)
                start += group.num_rows

    def batches(self, path: Path, columns: tuple[str, ...], start: int) -> Iterator[tuple[int, Any]]:
        """See ColumnReader."""
        with _pyarrow_parquet().ParquetFile(path, memory_map=False, pre_buffer=False) as parquet:
            row = 0
            # A group at a time: a batch across groups would be lost with the first damaged one.
            for index in range(parquet.num_row_groups):
                stop = row + parquet.metadata.row_group(index).num_rows
                if stop > start:
                    chosen = {"row_groups": [index], "columns": list(columns), "use_threads": False}
                    for batch in parquet.iter_batches(_BATCH_ROWS, **chosen):
                        yield row, batch
                        row += batch.num_rows
                row = stop


class ArrowReader(ColumnReader):
    """Arrow's IPC formats: the file format (Feather too) and the stream format, which `save_to_disk` writes."""

    def columns(self, path: Path) -> list[str]:
        """See ColumnReader."""
        with _open_arrow(path) as (schema, _):
            return list(schema.names)

    def blocks(self, file: SourceFile) -> Iterator[Block]:
        """See ColumnReader: the record batches."""
        start = 0
        with _open_arrow(file.path) as (_, batches):
            for batch in batches:
                yield Block(start, batch.num_rows, batch.nbytes)
                start += batch.num_rows

    def batches(self, path: Path, columns: tuple[str, ...], start: int) -> Iterator[tuple[int, Any]]:
        """See ColumnReader. Batches before `start` are passed over without being touched, unless compressed."""
        row = 0
        with _open_arrow(path) as (_, batches):
            for batch in batches:
                if row + batch.num_rows > start:
                    yield row, batch.select(list(columns))
                row += batch.num_rows


class _Cursor:
    """Where this process is in a table: spans come in order, so each usually goes on where the last one ended."""

    def __init__(self) -> None:
        self._key: tuple[Path, tuple[str, ...]] | None = None
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._current: tuple[int, Any] | None = None

    def rows(
        self, reader: ColumnReader, path: Path, columns: tuple[str, ...], start: int, stop: int
    ) -> Iterator[tuple[int, Any]]:
        """Record batches that make up rows [start, stop), each with its first row."""
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
        """Forget the place, as after an error."""
        self._key, self._batches, self._current = None, iter(()), None


_cursor = _Cursor()


def find_columns(file: SourceFile, names: list[str]) -> tuple[str, ...]:
    """The columns to read. Raises DataError when those that are needed are not there."""
    columns = file.fields.columns(names)
    if not columns:
        raise DataError(
            f"{file.path} has no column {file.fields}; it has {', '.join(names)}: set {file.fields.fix} beside the "
            f"path ({describe_formats()})."
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
    """Each row's record, None for an empty one, or what is wrong with it."""
    if isinstance(file.fields, ExampleFields):
        yield from (_parse_example(file.fields, batch.slice(row, 1), start + row) for row in range(batch.num_rows))
        return
    pa = _pyarrow()
    values, column = batch.column(0), batch.schema.names[0]
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # As bytes, so that one row that is not UTF-8 is known by itself.
        yield from map(
            _parse_text, values.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()).to_pylist()
        )
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        for scalar in values:
            yield _parse_row(scalar, column)
    else:
        raise DataError(f"{file.path} holds {kind} in its column `{column}`, neither text nor lists of ids.")


def _parse_example(fields: ExampleFields, row: Any, position: int) -> Record | str:
    try:
        return Record(fields.pick(drop_nulls(row.to_pylist()[0])), position=position)
    except BrokenRecordError as error:
        return str(error)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text ({error.reason})"


def _parse_text(value: bytes | None) -> Record | str | None:
    if value is None:
        return "holds no text"
    try:
        value.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text ({error.reason})"
    return Record(value) if value else None


def _parse_row(scalar: Any, column: str) -> Record | str | None:
    if not scalar.is_valid:
        return f"holds no list of ids in `{column}`"
    try:
        ids = parse_ids(scalar.values.to_numpy(zero_copy_only=False), column)
    except BrokenRecordError as error:
        return str(error)
    return Record(ids) if ids.size else None


def drop_nulls(value: Any) -> Any:
    """A value without the fields that are null: in a table every record has the fields of all others."""
    if isinstance(value, dict):
        return {key: drop_nulls(each) for key, each in value.items() if each is not None}
    is_nested = isinstance(value, list) and value and isinstance(value[0], dict | list)
    return [drop_nulls(each) for each in value] if is_nested else value


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the record batches of either IPC format. Mapped: batches are read as they are touched."""
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
    """What pyarrow raises for a file that is damaged or of another format."""
    return (_pyarrow().ArrowException, OSError)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ConfigError(
            "parquet and arrow files take the package pyarrow; install it with pip install 'echelon[data]'."
        ) from error
    return pyarrow


def _pyarrow_parquet() -> Any:
    _pyarrow()
    import pyarrow.parquet

    return pyarrow.parquet
