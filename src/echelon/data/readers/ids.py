"""Files of token ids and nothing else: nanoGPT's .bin, and .npy.

A row of a 2-D .npy is a document. All others are one stream of ids: a document ends after each separator, and where the
tokenizer has none the file is one document. The stream is kept as it is: files are often cut inside a document, so
nothing is put at their ends.
"""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from echelon.data.readers.compressed import open_plain
from echelon.data.readers.record import (
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
from echelon.errors import DataError

HEADER_INTS = 256
HEADERS: dict[int, tuple[int, type[np.unsignedinteger[Any]]]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""The files of llm.c begin with 256 int32: magic, version, number of ids; then ids of a type that goes by the magic."""


class IdsFileError(Exception):
    """A file is not what its format says; the message is the reason."""


class IdsReader(Reader):
    """Spans are ranges of ids, or of rows."""

    @abstractmethod
    def map(self, file: SourceFile) -> TokenIds:
        """The ids `[n]` or `[rows, n]`, mapped. Raises IdsFileError."""

    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        """See Reader."""
        try:
            ids = self.map(file)
        except IdsFileError as error:
            yield broken_file(file, str(error))
            return
        item_bytes = ids.dtype.itemsize * (ids.shape[1] if ids.ndim == 2 else 1)
        count = max(1, piece_bytes // max(1, item_bytes))
        for start in range(0, len(ids), count):
            stop = min(start + count, len(ids))
            yield Span(file, start, stop, (stop - start) * item_bytes, stop == len(ids))

    def read(self, span: Span, reading: Reading) -> Iterator[Record]:
        """See Reader."""
        ids = self.map(span.file)
        if len(ids) < span.stop:
            raise DataError(f"{span.file.path} became shorter while it was read; run again when it is complete.")
        if ids.ndim == 2:
            yield from (Record(np.asarray(row)) for row in ids[span.start : span.stop] if row.size)
        else:
            yield from _read_stream(ids, span.start, span.stop, reading)

    def count(self, file: SourceFile, limit: int, reading: Reading) -> int:
        """See Reader. Without a separator a stream is one document, and its size is all there is to see."""
        if reading.separator is None and file.size:
            try:
                ids = self.map(file)
            except IdsFileError:
                return 0
            return min(limit, len(ids) if ids.ndim == 2 else int(len(ids) > 0))
        return super().count(file, limit, reading)


class NanogptReader(IdsReader):
    """uint16 ids as nanoGPT's `prepare.py` writes them, or with the header of llm.c and modded-nanogpt."""

    def map(self, file: SourceFile) -> TokenIds:
        """See IdsReader."""
        with open_plain(file) as stream:
            head = stream.read(4 * HEADER_INTS)
        header = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
        if header.size == HEADER_INTS and int(header[0]) in HEADERS:
            version, kind = HEADERS[int(header[0])]
            dtype = np.dtype(kind).newbyteorder("<")
            num_ids = int(header[2])
            if int(header[1]) != version:
                raise IdsFileError(f"is of version {int(header[1])}; with this magic number, {version} is read")
            if file.size != len(head) + num_ids * dtype.itemsize:
                raise IdsFileError(f"has {file.size} bytes, not those of the {num_ids} ids its header says")
            return _map(file, dtype, num_ids, len(head))
        if file.size % 2:
            raise IdsFileError(f"has {file.size} bytes, which is no whole number of uint16 ids")
        return _map(file, np.dtype("<u2"), file.size // 2, 0)


class NumpyReader(IdsReader):
    """Arrays of whole numbers, as `np.save` writes them."""

    def map(self, file: SourceFile) -> TokenIds:
        """See IdsReader."""
        try:
            ids = np.load(file.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise IdsFileError(f"is no readable .npy file ({error})") from error
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
            raise IdsFileError("holds no array of whole numbers of one or two dimensions")
        return ids


def _map(file: SourceFile, dtype: np.dtype[Any], num_ids: int, offset: int) -> TokenIds:
    if not num_ids:
        return np.zeros(0, dtype=dtype)
    return np.memmap(file.path, dtype=dtype, mode="r", offset=offset, shape=(num_ids,))


def _read_stream(ids: TokenIds, start: int, stop: int, reading: Reading) -> Iterator[Record]:
    """The documents in ids [start, stop) of a stream, and pieces of those that reach beyond."""
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
        # `ends` asks for a separator where there is none; a stream is left as it is.
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
