"""JSON files that hold one array of records: each of its objects is a record, as a line of JSON lines is.

The array is decoded as it is read, an element at a time: memory is bounded by the largest one.
"""

import codecs
import json
from collections.abc import Iterator
from typing import Any

from echelon.data.readers.compressed import DamagedStreamError, Decompressed, open_decompressed
from echelon.data.readers.record import PIECE_BYTES, Broken, BrokenRecordError, Record, SourceFile
from echelon.data.readers.sequence import SequentialReader

_SPACE = " \t\r\n"


class ArrayReader(SequentialReader):
    """The elements of the array. A position is the number of an element, from 0."""

    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """See SequentialReader. An array that breaks off is a broken record there: nothing behind it can be found."""
        number = 0
        with open_decompressed(file) as stream:
            try:
                for number, value in enumerate(_elements(stream), 1):
                    found = _parse(file, value, number - 1)
                    if found is not None:
                        yield stream.consumed, found
            except (DamagedStreamError, ValueError, RecursionError) as error:
                yield file.size, Broken(file, number, f"cannot be read, nor what follows ({error})")


def is_array(file: SourceFile) -> bool:
    """Whether a file begins as an array of objects does."""
    with open_decompressed(file) as stream:
        try:
            start = stream.read(2**12).removeprefix(codecs.BOM_UTF8).lstrip()
        except DamagedStreamError:
            return False
    return start[:1] == b"[" and start[1:].lstrip()[:1] == b"{"


def _elements(stream: Decompressed) -> Iterator[Any]:
    """The values of the array. Raises ValueError for what is none, or is cut off, and DamagedStreamError."""
    text, decoder = _Text(stream), json.JSONDecoder()
    if text.next_character() != "[":
        raise ValueError("it is no array of records, [{...}, {...}]")
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
            raise ValueError("it ends before the array does" if not separator else f"{separator!r} instead of a comma")


class _Text:
    """A stream of UTF-8 as text, held from the place that is read at on."""

    def __init__(self, stream: Decompressed) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._held, self._place, self._ended = "", 0, False

    def next_character(self) -> str:
        """The next character that is no space, without passing over it; "" at the end."""
        while True:
            while self._place < len(self._held) and self._held[self._place] in _SPACE:
                self._place += 1
            if self._place < len(self._held) or self._ended:
                return self._held[self._place : self._place + 1]
            self._fill(PIECE_BYTES)

    def skip(self, count: int) -> None:
        """Pass over characters."""
        self._place += count

    def decode(self, decoder: json.JSONDecoder) -> Any:
        """The JSON value that begins here. What cannot be read yet is read with ever more of the file behind it."""
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
            self._fill(size)
            size *= 2

    def _fill(self, size: int) -> None:
        data = self._stream.read(size)
        self._ended = not data
        self._held = self._held[self._place :] + self._decoder.decode(data, final=self._ended)
        self._place = 0


def _parse(file: SourceFile, value: Any, number: int) -> Record | Broken | None:
    try:
        content = file.fields.pick(value)
    except BrokenRecordError as error:
        return Broken(file, number, str(error))
    return Record(content, position=number) if len(content) else None
