"""Read the bytes of plain and compressed (.gz, .zst, .zstd) files."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from echelon.ground.errors import DataError
from echelon.ground.extras import missing_package
from echelon.learn.data.readers.record import SourceFile

COMPRESSIONS = (".gz", ".zst", ".zstd")

HARMLESS_BYTES = 2**30
"""A compressed file may become this large, whatever its size."""

_MOST_GROWTH = 2000  # Text does not shrink this much, and gzip cannot: a larger file was made to fill disks.


class DamagedStreamError(Exception):
    """A compressed file cannot be decompressed. The message gives the reason."""


def is_compressed(path: Path) -> bool:
    """Whether the file name has a compression suffix."""
    return path.suffix.lower() in COMPRESSIONS


def open_plain(file: SourceFile) -> BinaryIO:
    """Open a file's bytes as stored on disk. Raises DataError if it cannot be opened."""
    try:
        return file.path.open("rb")
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}.") from error


def read_bytes(file: SourceFile, start: int, stop: int) -> bytes:
    """Read bytes [start, stop) of a file as stored on disk. Raises DataError if the file is shorter."""
    with open_plain(file) as stream:
        stream.seek(start)
        data = stream.read(stop - start)
    if len(data) != stop - start:
        raise DataError(f"{file.path} became shorter while it was being read; run again when the file is complete.")
    return data


class Decompressed:
    """A file's bytes, decompressed while reading. `consumed` is the position in the file as stored."""

    def __init__(self, raw: BinaryIO, suffix: str) -> None:
        self._raw = raw
        self._read: Callable[[int], bytes] = raw.read
        self._damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        self._is_packed = suffix in COMPRESSIONS
        self._num_bytes = 0
        if suffix == ".gz":
            self._read = gzip.GzipFile(fileobj=raw).read
        elif suffix in (".zst", ".zstd"):
            pa = import_pyarrow("a .zst file")
            self._read = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd").read
            self._damages = (OSError,)

    @property
    def consumed(self) -> int:
        """Bytes read from the file as stored on disk."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Read `size` bytes; fewer only at the end. Raises DamagedStreamError."""
        parts, left = [], size
        try:
            while left and (part := self._read(left)):
                parts.append(part)
                left -= len(part)
        except self._damages as error:
            raise DamagedStreamError(f"cannot be decompressed ({error})") from error
        self._num_bytes += size - left
        if self._is_packed and self._num_bytes > max(HARMLESS_BYTES, _MOST_GROWTH * self.consumed):
            raise DamagedStreamError(f"unpacks to more than {_MOST_GROWTH:,} times its size")
        return b"".join(parts)


@contextmanager
def open_decompressed(file: SourceFile) -> Iterator[Decompressed]:
    """Open a file, decompressing it if its name has a compression suffix.

    Raises DataError if it cannot be opened, ConfigError if the package that decompresses it is not installed.
    """
    with open_plain(file) as raw:
        yield Decompressed(raw, file.path.suffix.lower())


def import_pyarrow(asked: str) -> Any:
    """Return the package pyarrow. Raises ConfigError, which begins with what asks for it."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise missing_package(asked, "pyarrow", "data") from error
    return pyarrow
