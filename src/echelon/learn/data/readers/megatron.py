"""Megatron-LM indexed datasets: NAME.bin contains the ids, NAME.idx the positions of sequences and documents.

The index, little-endian, as written by `megatron/core/datasets/indexed_dataset.py`: nine bytes `MMIDIDX\\0\\0`, uint64
version 1, uint8 code of the ids' type, uint64 number of sequences S, uint64 number of document bounds D, int32 lengths
of the sequences [S], int64 offsets of the sequences in bytes [S], int64 document bounds [D]: document d consists of the
sequences bounds[d] to bounds[d+1]. Modes of the sequences (int8 [S]) may follow; they are not used for text.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.learn.data.readers.compressed import open_plain
from echelon.learn.data.readers.ids import map_array
from echelon.learn.data.readers.record import (
    PIECE_BYTES,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    TokenIds,
    broken_file,
)

MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of the ids by code. The codes 6 and 7 are float64 and float32, which cannot be ids."""

_HEADER = struct.Struct("<9sQBQQ")


class MegatronIndexError(Exception):
    """An index is damaged or does not match its .bin. The message gives the reason."""


@dataclass(frozen=True)
class MegatronIndex:
    """A memory-mapped index: sequence lengths and byte offsets `[S]`, document bounds `[D]`."""

    dtype: np.dtype[Any]
    lengths: TokenIds
    offsets: TokenIds
    bounds: TokenIds


class MegatronReader(Reader):
    """Read Megatron-LM indexed datasets. Spans are ranges of documents; the source file is the .idx."""

    @override
    def cut(self, file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
        try:
            index = load_index(file.path)
        except MegatronIndexError as error:
            yield broken_file(file, str(error))
            return
        num_documents = len(index.bounds) - 1
        start, held = 0, 0
        share = file.size / max(1, num_documents)
        for document in range(num_documents):
            low, high = int(index.bounds[document]), int(index.bounds[document + 1])
            held += int(index.lengths[low:high].sum(dtype=np.int64)) * index.dtype.itemsize
            if held >= piece_bytes or document == num_documents - 1:
                stop = document + 1
                yield Span(file, start, stop, int(stop * share) - int(start * share), stop == num_documents)
                start, held = stop, 0

    @override
    def read(self, span: Span, reading: Reading) -> Iterator[Record]:
        """Raises DataError if the .bin cannot be opened."""
        index = load_index(span.file.path)
        with open_plain(replace(span.file, path=span.file.path.with_suffix(".bin"))) as stream:
            for document in range(span.start, span.stop):
                parts = []
                for sequence in range(int(index.bounds[document]), int(index.bounds[document + 1])):
                    stream.seek(int(index.offsets[sequence]))
                    num_bytes = int(index.lengths[sequence]) * index.dtype.itemsize
                    if len(data := stream.read(num_bytes)) != num_bytes:
                        raise DataError(
                            f"{span.file.path.with_suffix('.bin')} became shorter while it was being read; run again "
                            "when the file is complete."
                        )
                    parts.append(np.frombuffer(data, dtype=index.dtype))
                ids = np.concatenate(parts) if parts else np.zeros(0, dtype=index.dtype)
                if ids.size:
                    yield Record(ids)

    @override
    def count(self, file: SourceFile, limit: int, reading: Reading) -> int:
        """The index contains the count."""
        try:
            return min(limit, len(load_index(file.path).bounds) - 1)
        except MegatronIndexError:
            return 0


def is_megatron_index(path: Path) -> bool:
    """Whether a file starts with the magic bytes of an index."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


@lru_cache(maxsize=4)
def load_index(path: Path) -> MegatronIndex:
    """Map an index and check it against its .bin. Raises MegatronIndexError."""
    try:
        with path.open("rb") as stream:
            header = stream.read(_HEADER.size)
        size, data_bytes = path.stat().st_size, path.with_suffix(".bin").stat().st_size
    except OSError as error:
        raise MegatronIndexError(f"or its .bin cannot be read ({error.filename}: {error.strerror})") from error
    dtype, num_sequences, num_bounds = _parse_header(header)
    starts = [*accumulate((_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds))]
    if size < starts[-1] or num_bounds < 1:
        raise MegatronIndexError(f"has {size} bytes, too few for {num_sequences} sequences and {num_bounds} bounds")
    index = MegatronIndex(
        dtype,
        lengths=map_array(path, np.dtype("<i4"), num_sequences, starts[0]),
        offsets=map_array(path, np.dtype("<i8"), num_sequences, starts[1]),
        bounds=map_array(path, np.dtype("<i8"), num_bounds, starts[2]),
    )
    _check_places(index, data_bytes)
    return index


def _parse_header(header: bytes) -> tuple[np.dtype[Any], int, int]:
    """Parse the type of the ids and the numbers of sequences and document bounds. Raises MegatronIndexError."""
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise MegatronIndexError("is not a Megatron index: it does not start with MMIDIDX")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if version != 1:
        raise MegatronIndexError(f"has version {version}; only version 1 is supported")
    if code not in DTYPES:
        raise MegatronIndexError(f"gives the ids the type code {code}; the integer types are {sorted(DTYPES)}")
    return np.dtype(DTYPES[code]), num_sequences, num_bounds


def _check_places(index: MegatronIndex, data_bytes: int) -> None:
    """Raise MegatronIndexError unless all sequences are inside the .bin and the documents cover them in order."""
    lengths, offsets, bounds = index.lengths, index.offsets, index.bounds
    num_sequences = len(lengths)
    if num_sequences and (lengths.min() < 0 or offsets.min() < 0):
        raise MegatronIndexError("has negative lengths or offsets")
    sizes = lengths.astype(np.int64) * index.dtype.itemsize  # below 2^34, while a sum with an offset may wrap
    if (offsets > data_bytes - sizes).any():
        raise MegatronIndexError(f"extends beyond its .bin, which has {data_bytes} bytes")
    if int(sizes.sum()) > data_bytes:
        raise MegatronIndexError(f"has sequences of {sizes.sum()} bytes together, and its .bin has {data_bytes}")
    if bounds[0] != 0 or bounds[-1] != num_sequences or (bounds[1:] < bounds[:-1]).any():
        raise MegatronIndexError("has document bounds that do not cover its sequences in order")
