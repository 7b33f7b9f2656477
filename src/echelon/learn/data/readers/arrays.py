"""JSON files that contain one array of objects. Each object is a record, like a line of a JSON Lines file.

The array is decoded one element at a time, so the largest element bounds the memory.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from echelon.ground.sizes import render_bytes
from echelon.learn.data.readers.compressed import DamagedStreamError, Decompressed, open_decompressed
from echelon.learn.data.readers.record import MAX_RECORD_BYTES, PIECE_BYTES, Broken, Record, SourceFile, parse_record
from echelon.learn.data.readers.sequence import SequentialReader

_SPACE = re.compile(r"[ \t\r\n]*")


class ArrayReader(SequentialReader):
    """Read the elements of the array. A position is the index of an element, from 0."""

    @override
    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """A syntax error yields one broken record and ends the file: no later record is found."""
        number = 0
        with open_decompressed(file) as stream:
            try:
                for number, value in enumerate(_elements(stream), 1):
                    if (record := parse_record(file, number - 1, value)) is not None:
                        yield stream.consumed, record
            except (DamagedStreamError, ValueError, RecursionError) as error:
                yield file.size, Broken(file, number, f"cannot be read, nor can the rest of the file ({error})")


def is_array(file: SourceFile) -> bool:
    """Whether a file starts like a JSON array of objects."""
    with open_decompressed(file) as stream:
        try:
            start = stream.read(2**12).removeprefix(codecs.BOM_UTF8).lstrip()
        except DamagedStreamError:
            return False
    return start[:1] == b"[" and start[1:].lstrip()[:1] == b"{"


def _elements(stream: Decompressed) -> Iterator[Any]:
    """Yield the values of the array. Raises ValueError (not an array, or truncated) and DamagedStreamError."""
    text, decoder = _Text(stream), json.JSONDecoder()
    if text.next_character() != "[":
        raise ValueError("it is not an array of records, [{...}, {...}]")
    text.skip(1)
    if text.next_character() == "]":
        return
    while True:
        text.next_character()
        yield text.decode(decoder)
        separator = text.next_character()
        text.skip(1)
        if separator == "]":
            return
        if separator != ",":
            raise ValueError(
                "the file ends inside the array" if not separator else f"found {separator!r} instead of a comma"
            )


class _Text:
    """A UTF-8 stream as text. It keeps only the text from the current position on."""

    def __init__(self, stream: Decompressed) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._held, self._place, self._ended = "", 0, False

    def next_character(self) -> str:
        """Skip white space and return the next character without consuming it; "" at the end."""
        while True:
            self._place = _SPACE.match(self._held, self._place).end()  # type: ignore[union-attr]
            if self._place < len(self._held) or self._ended:
                return self._held[self._place : self._place + 1]
            self._fill(PIECE_BYTES)

    def skip(self, count: int) -> None:
        """Skip `count` characters."""
        self._place += count

    def decode(self, decoder: json.JSONDecoder) -> Any:
        """Decode the JSON value that starts here, reading more of the file until the value is complete."""
        size = PIECE_BYTES
        while True:
            try:
                value, stop = decoder.raw_decode(self._held, self._place)
                if stop < len(self._held) or self._ended:
                    self._place = stop
                    return value
            except ValueError:
                if self._ended:
                    raise
            if len(self._held) - self._place > MAX_RECORD_BYTES:
                raise ValueError(f"a value does not end within {render_bytes(MAX_RECORD_BYTES)}")
            self._fill(size)
            size *= 2

    def _fill(self, size: int) -> None:
        data = self._stream.read(size)
        self._ended = not data
        self._held = self._held[self._place :] + self._decoder.decode(data, final=self._ended)
        self._place = 0
