"""Files that contain only token ids: nanoGPT's .bin, and .npy.

Each row of a 2-D .npy is a document. All other files are one stream of ids: a document ends after each separator, and
without a separator in the tokenizer the file is one document. The stream is not changed: such files often end inside a
document, so no separator is added at their ends.
"""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.learn.data.readers.compressed import open_plain
from echelon.learn.data.readers.record import (
    PIECE_BYTES,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    TokenIds,
    broken_file,
    digest_document,
)

HEADER_INTS = 256
HEADERS: dict[int, tuple[int, type[np.unsignedinteger[Any]]]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""llm.c files start with 256 int32: magic, version, number of ids. Maps the magic to (version, type of the ids)."""


class IdsFileError(Exception):
    """A file does not match its format. The message gives the reason."""


class IdsReader(Reader):
    """The common part of the readers of id files. Spans are ranges of ids, or of rows."""

    @abstractmethod
    def map(self, file: SourceFile) -> TokenIds:
        """Memory-map the ids `[n]` or `[rows, n]`. Raises IdsFileError."""

    @override
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        try:
            ids = self.map(file)
        except IdsFileError as error:
            yield broken_file(file, str(error))
            return
        if not ids.size:  # also of endless rows without ids
            return
        item_bytes = ids.dtype.itemsize * (ids.shape[1] if ids.ndim == 2 else 1)
        count = max(1, piece_bytes // max(1, item_bytes))
        for start in range(0, len(ids), count):
            stop = min(start + count, len(ids))
            yield Span(file, start, stop, (stop - start) * item_bytes, stop == len(ids))

    @override
    def read(self, span: Span, reading: Reading) -> Iterator[Record]:
        ids = self.map(span.file)
        if len(ids) < span.stop:
            raise DataError(
                f"{span.file.path} became shorter while it was being read; run again when the file is complete."
            )
        if ids.ndim == 2:
            yield from (Record(np.asarray(row)) for row in ids[span.start : span.stop] if row.size)
        else:
            yield from _read_stream(ids, span.start, span.stop, reading)

    @override
    def count(self, file: SourceFile, limit: int, reading: Reading) -> int:
        """Without a separator a stream is one document, so its size is enough."""
        if reading.separator is None and file.size:
            try:
                ids = self.map(file)
            except IdsFileError:
                return 0
            return min(limit, len(ids) if ids.ndim == 2 and ids.size else int(ids.size > 0))
        return super().count(file, limit, reading)


class NanogptReader(IdsReader):
    """uint16 ids as nanoGPT's `prepare.py` writes them, or with the header of llm.c and modded-nanogpt."""

    @override
    def map(self, file: SourceFile) -> TokenIds:
        with open_plain(file) as stream:
            head = stream.read(4 * HEADER_INTS)
        header = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
        if header.size == HEADER_INTS and int(header[0]) in HEADERS:
            version, kind = HEADERS[int(header[0])]
            dtype = np.dtype(kind).newbyteorder("<")
            num_ids = int(header[2])
            if int(header[1]) != version:
                raise IdsFileError(
                    f"has version {int(header[1])}; version {version} is supported with this magic number"
                )
            if file.size != len(head) + num_ids * dtype.itemsize:
                raise IdsFileError(f"has {file.size} bytes, which does not match the {num_ids} ids in its header")
            return map_array(file.path, dtype, num_ids, len(head))
        if file.size % 2:
            raise IdsFileError(f"has {file.size} bytes, which is not a whole number of uint16 ids")
        return map_array(file.path, np.dtype("<u2"), file.size // 2, 0)


class NumpyReader(IdsReader):
    """Integer arrays written by `np.save`."""

    @override
    def map(self, file: SourceFile) -> TokenIds:
        try:
            with np.errstate(over="ignore"):  # of the size, which does not fit the file then
                ids = np.load(file.path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy has many for a header of others
            raise IdsFileError(f"is not a readable .npy file ({' '.join(str(error).split())[:200]})") from error
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
            raise IdsFileError("is not an integer array of one or two dimensions")
        return ids


def map_array(path: Path, dtype: np.dtype[Any], count: int, offset: int) -> TokenIds:
    """Memory-map `count` integers of a file `[count]`, from a byte offset on."""
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)


def _read_stream(ids: TokenIds, start: int, stop: int, reading: Reading) -> Iterator[Record]:
    """Yield the documents in ids [start, stop) of a stream, and the pieces of documents that extend beyond."""
    separator = reading.separator
    part = np.asarray(ids[start:stop])
    ends = np.flatnonzero(part == separator) + 1 if separator is not None else np.zeros(0, dtype=np.int64)
    bounds = [0, *ends.tolist()]
    if bounds[-1] < part.size:
        bounds.append(part.size)
    begins = start == 0 or (separator is not None and int(ids[start - 1]) == separator)
    for low, high in pairwise(bounds):
        is_first = begins or low > 0
        ended = separator is not None and int(part[high - 1]) == separator
        digest = None
        if reading.digests and is_first and not ended and stop < len(ids):
            digest = digest_document(_read_document(ids, start + low, separator))
        # `ends=True` would add a separator; the stream already contains them.
        yield Record(part[low:high], is_first, False, digest)


def _read_document(ids: TokenIds, start: int, separator: int | None) -> Iterator[TokenIds]:
    while start < len(ids):
        part = np.asarray(ids[start : start + PIECE_BYTES])
        ends = np.flatnonzero(part == separator) if separator is not None else part[:0]
        if ends.size:
            yield part[: int(ends[0]) + 1]
            return
        yield part
        start += part.size
