"""Plain text: a document is a file. Long files are cut into pieces without changing their tokens.

The position of a cut matters because a tokenizer does not see across it. Byte-level BPE first splits text with a
regular expression and never merges across its splits. A cut is therefore exact if the expression splits there anyway
and treats the end of the text like the next character. The expressions in use (GPT-2, Llama 3, Qwen, o200k) do both at
a newline between two characters that are not white space. White space before the newline is not allowed: GPT-2 joins
the last white-space character to the text that follows, which is missing at the end of a piece. Neither is a slash
after it: o200k joins `.`, newline and `/`. Text without such a newline is cut between a letter or digit and the
following line end, which is also exact; text without line ends, between any two characters, where a token may differ.
"""

import codecs
import io
import re
from collections.abc import Iterator
from typing import BinaryIO

from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.learn.data.readers.compressed import (
    DamagedStreamError,
    is_compressed,
    open_decompressed,
    open_plain,
    read_bytes,
)
from echelon.learn.data.readers.record import (
    PIECE_BYTES,
    Broken,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    broken_file,
    digest_document,
)

_WINDOW_BYTES = 2**16
_SEARCHED_WINDOWS = 16
_LINE_STARTS_WORD = re.compile(r"(?<=\S)\n(?=[^\s/])")
_WORD_ENDS_LINE = re.compile(r"(?<=[^\W_])(?=\r?\n)")
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\v\f\r\b\x1b"))
"""Control characters that texts rarely contain; the others move a cursor or set colours."""

_MOST_CONTROLS = 0.1
"""A piece with a larger share of control characters is binary. Half of UTF-16's bytes are zeros in western text."""

_NOT_TEXT = "is not UTF-8 text"


class TextReader(Reader):
    """Read plain text. A span is a range of bytes; of a compressed file, it carries the decompressed piece."""

    @override
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        """A long file of a folder is checked first: otherwise pieces are written before a bad byte."""
        compressed = is_compressed(file.path)
        checked = not file.required and (compressed or file.size > piece_bytes)
        if checked and (fault := find_fault(file)) is not None:
            yield broken_file(file, fault)
        elif compressed:
            yield from _cut_stream(file, piece_bytes)
        else:
            yield from _cut_file(file, piece_bytes)

    @override
    def read(self, span: Span, reading: Reading) -> Iterator[Record | Broken]:
        """Raises DataError naming the byte of a required file that is not UTF-8."""
        file, is_first = span.file, span.start == 0
        data = read_bytes(file, span.start, span.stop) if span.data is None else span.data
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            if not file.required and is_first and span.ends:
                yield Broken(file, None, _NOT_TEXT)
                return
            raise DataError(
                f"{file.path} {_NOT_TEXT}: the byte at offset {span.start + error.start} is invalid ({error.reason}); "
                f"convert the file, for example with iconv."
            ) from error
        if (fault := _find_binary(data)) is not None:
            if not file.required:
                yield Broken(file, None, fault)
                return
            raise DataError(
                f"{file.path} {fault} from the offset {span.start:,} on; give a file of text, or convert it: UTF-16 "
                "with iconv -f UTF-16 -t UTF-8."
            )
        is_cut = is_first and not span.ends
        digest = digest_document(_read_pieces(file)) if is_cut and reading.digests else None
        yield Record(data, is_first, span.ends, digest)

    @override
    def count(self, file: SourceFile, limit: int, reading: Reading) -> int:
        """One if the file is not empty and is text."""
        return min(limit, int(file.size > 0 and (file.required or find_fault(file) is None)))


def find_fault(file: SourceFile) -> str | None:
    """Return why a whole file is not text, as a clause; None if it is. The file is read in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in _read_pieces(file):
            decoder.decode(piece)
            if (fault := _find_binary(piece)) is not None:
                return fault
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, DamagedStreamError):
        return _NOT_TEXT
    return None


def _find_binary(data: bytes) -> str | None:
    """Return a clause about a piece that is not text although it is valid UTF-8, such as zeros; None for text."""
    controls = len(data) - len(data.translate(None, _CONTROLS))
    if controls <= _MOST_CONTROLS * len(data):
        return None
    return f"is binary, not text: {controls / len(data):.0%} of its bytes are control characters"


def _read_pieces(file: SourceFile) -> Iterator[bytes]:
    with open_decompressed(file) as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


def _cut_file(file: SourceFile, piece_bytes: int) -> Iterator[Span]:
    start = 0
    if file.size > piece_bytes:
        with open_plain(file) as stream:
            while file.size - start > piece_bytes:
                stop = _find_cut(stream, start + piece_bytes, file.size)
                yield Span(file, start, stop, stop - start, stop == file.size)
                start = stop
    if start < file.size:
        yield Span(file, start, file.size, file.size - start, True)


def _cut_stream(file: SourceFile, piece_bytes: int) -> Iterator[Span]:
    enough = piece_bytes + (_SEARCHED_WINDOWS + 1) * _WINDOW_BYTES
    offset, consumed, buffer, is_last = 0, 0, b"", False
    try:
        with open_decompressed(file) as stream:
            while not is_last and (buffer := buffer + stream.read(enough - len(buffer))):
                is_last = len(buffer) < enough
                cut = len(buffer) if is_last else _find_cut(io.BytesIO(buffer), piece_bytes, len(buffer))
                yield Span(file, offset, offset + cut, stream.consumed - consumed, is_last, buffer[:cut])
                offset, consumed, buffer = offset + cut, stream.consumed, buffer[cut:]
    except DamagedStreamError as error:
        raise DataError(f"{file.path} {error}.") from error


def _find_cut(stream: BinaryIO, target: int, size: int) -> int:
    """Find the first good position to cut at or after `target`; the end of the file if none is found before it."""
    for pattern in (_LINE_STARTS_WORD, _WORD_ENDS_LINE):
        for window in range(_SEARCHED_WINDOWS):
            cut = _search_window(stream, target + window * _WINDOW_BYTES, size, pattern)
            if cut is not None:
                return cut
    if target + _SEARCHED_WINDOWS * _WINDOW_BYTES >= size:
        return size
    stream.seek(target)
    following = stream.read(4)
    is_start = (index for index, byte in enumerate(following) if byte & 0xC0 != 0x80)
    return target + next(is_start, 0)


def _search_window(stream: BinaryIO, offset: int, size: int, pattern: re.Pattern[str]) -> int | None:
    stream.seek(offset)
    # The bytes of a character that the window cuts become surrogates and encode back to the same bytes. The search
    # skips both edges, so that it sees only whole characters.
    data = stream.read(max(0, min(_WINDOW_BYTES, size - offset)))
    text = data.decode("utf-8", "surrogateescape") if b"\n" in data else ""  # both patterns contain it
    if (match := pattern.search(text, 4, max(4, len(text) - 4))) is None:
        return None
    return offset + len(text[: match.end()].encode("utf-8", "surrogateescape"))
