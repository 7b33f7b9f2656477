"""Read the bytes of plain and compressed (.gz, .zst, .zstd) files."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data.readers.record import SourceFile

COMPRESSIONS = (".gz", ".zst", ".zstd")

_PACKED_BYTES = 2**16


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
        if suffix == ".gz":
            self._read = gzip.GzipFile(fileobj=raw).read
        elif suffix in (".zst", ".zstd"):
            self._read = _ZstdFrames(raw).read
            self._damages = (EOFError, _import_zstandard().ZstdError)

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
        return b"".join(parts)


class _ZstdFrames:
    """A .zst file of one or several frames. zstandard's own reader does not report a truncated file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decompressor = _import_zstandard().ZstdDecompressor()
        self._frame: Any = None
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes; none at the end. Raises EOFError if a frame is truncated."""
        while not self._ready:
            ended = self._frame is not None and self._frame.eof
            packed = (self._frame.unused_data if ended else b"") or self._raw.read(_PACKED_BYTES)
            if not packed:
                if self._frame is not None and not ended:
                    raise EOFError("the file ends in the middle of a frame")
                return b""
            if self._frame is None or ended:
                self._frame = self._decompressor.decompressobj()
            self._ready = self._frame.decompress(packed)
        part, self._ready = self._ready[:size], self._ready[size:]
        return part


@contextmanager
def open_decompressed(file: SourceFile) -> Iterator[Decompressed]:
    """Open a file, decompressing it if its name has a compression suffix.

    Raises DataError if it cannot be opened, ConfigError if the package that decompresses it is not installed.
    """
    with open_plain(file) as raw:
        yield Decompressed(raw, file.path.suffix.lower())


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "a .zst file requires the package zstandard; install it with pip install 'echelon[data]'."
        ) from error
    return zstandard
