"""JSON Lines. A document is a line: the text or the ids in one of its fields, or an example in several fields."""

import json
from collections.abc import Iterator
from typing import BinaryIO

from typing_extensions import override

from echelon.ground.sizes import render_bytes
from echelon.learn.data.readers.compressed import (
    DamagedStreamError,
    is_compressed,
    open_decompressed,
    open_plain,
    read_bytes,
)
from echelon.learn.data.readers.record import (
    MAX_RECORD_BYTES,
    PIECE_BYTES,
    Broken,
    BrokenRecordError,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
)

_WINDOW_BYTES = 2**16
_LEAST_BYTES = 2**12


class JsonLinesReader(Reader):
    """Read JSON Lines. A span is a range of whole lines in bytes; of a compressed file, it carries the lines' text.

    A position is a line's byte offset, since line numbers are known only after reading all earlier lines. In a
    compressed file, which is read from the start anyway, it is the line number.
    """

    @override
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        if is_compressed(file.path):
            yield from _cut_stream(file, piece_bytes)
            return
        start = 0
        with open_plain(file) as stream:
            while start < file.size:
                stop = file.size
                if file.size - start > piece_bytes:
                    stop = _find_line_end(stream, start + piece_bytes, file.size)
                yield Span(file, start, stop, stop - start)
                start = stop

    @override
    def read(self, span: Span, reading: Reading) -> Iterator[Record | Broken]:
        """A line that is not a record is returned as broken."""
        file, position = span.file, span.start
        data = read_bytes(file, span.start, span.stop) if span.data is None else span.data
        for line in data.split(b"\n"):
            yield from _parse(file, line, position)
            position += len(line) + 1 if span.data is None else 1

    @override
    def place(self, file: SourceFile, position: int) -> str:
        """The file and the line number."""
        if is_compressed(file.path):
            return f"{file.path}:{position}"
        number, left = 1, position
        with open_plain(file) as stream:
            while left and (window := stream.read(min(PIECE_BYTES, left))):
                number += window.count(b"\n")
                left -= len(window)
        return f"{file.path}:{number}"


def _parse(file: SourceFile, line: bytes, position: int) -> Iterator[Record | Broken]:
    if not line.strip():
        return
    try:
        content = file.fields.pick(json.loads(line))
    except BrokenRecordError as error:
        yield Broken(file, position, str(error))
    except (ValueError, RecursionError) as error:
        yield Broken(file, position, f"cannot be read ({error})")
    else:
        if len(content):
            yield Record(content, position=position)


def _find_line_end(stream: BinaryIO, target: int, size: int) -> int:
    stream.seek(target)
    offset = target
    while window := stream.read(_WINDOW_BYTES):
        index = window.find(b"\n")
        if index >= 0:
            return min(offset + index + 1, size)
        offset += len(window)
    return size


def _cut_stream(file: SourceFile, piece_bytes: int) -> Iterator[Span]:
    number, consumed = 1, 0
    held, num_held = list[bytes](), 0  # the start of a line, which is not kept if the line is too long
    with open_decompressed(file) as stream:
        while True:
            try:
                block = stream.read(max(piece_bytes, _LEAST_BYTES))
            except DamagedStreamError as error:
                broken = (Broken(file, number, str(error)),)
                yield Span(file, number, number, file.size - consumed, True, records=broken)
                return
            ends, cut = not block, block.rfind(b"\n") + 1
            if cut == 0 and not ends:
                held.append(block)
                num_held += len(block)
                if num_held > MAX_RECORD_BYTES:
                    held.clear()
                continue
            if num_held > MAX_RECORD_BYTES:
                broken = (Broken(file, number, f"is longer than {render_bytes(MAX_RECORD_BYTES)}"),)
                yield Span(file, number, number, 0, records=broken)
                first = block.find(b"\n") + 1
                block, cut, number = block[first:], cut - first, number + 1
            data = b"".join([*held, block[:cut]])
            held, num_held = [block[cut:]], len(block) - cut
            stop = number + data.count(b"\n")
            yield Span(file, number, stop, stream.consumed - consumed, ends, data)
            number, consumed = stop, stream.consumed
            if ends:
                return
