"""Formats that only one process can read, in order: it reads the records and distributes them in blocks."""

from abc import abstractmethod
from collections.abc import Iterator

from typing_extensions import override

from echelon.learn.data.readers.record import (
    PIECE_BYTES,
    Broken,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    content_bytes,
)


class SequentialReader(Reader):
    """A reader whose spans carry their records. The number of spans in flight bounds the memory."""

    @abstractmethod
    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """Yield the records of a file in order, each with the number of bytes read so far. Raises DataError."""

    @override
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        """A span has enough records to reach `piece_bytes`."""
        start, records, held, consumed, used = 0, list[Record | Broken](), 0, 0, 0
        for used, record in self.walk(file):
            records.append(record)
            held += content_bytes(record.content) if isinstance(record, Record) else 1
            if held >= piece_bytes:
                yield Span(file, start, start + len(records), used - consumed, records=tuple(records))
                start, records, held, consumed = start + len(records), [], 0, used
        if records:
            yield Span(file, start, start + len(records), used - consumed, True, records=tuple(records))

    @override
    def read(self, span: Span, reading: Reading) -> Iterator[Record | Broken]:
        assert span.records is not None
        return iter(span.records)
