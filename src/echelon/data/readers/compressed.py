"""Files as bytes, whether they lie there plain or compressed (.gz, .zst)."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from echelon.data.readers.record import SourceFile
from echelon.errors import ConfigError, DataError

COMPRESSIONS = (".gz", ".zst")

_PACKED_BYTES = 2**16


class DamagedStreamError(Exception):
    """A compressed file does not decompress; the message is the reason."""


def is_compressed(path: Path) -> bool:
    """Whether the file's name says that it is compressed."""
    return path.suffix.lower() in COMPRESSIONS


def open_plain(file: SourceFile) -> BinaryIO:
    """The file's bytes as they lie on the disk. Raises DataError when it cannot be opened."""
    try:
        return file.path.open("rb")
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}.") from error


def read_bytes(file: SourceFile, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file as they lie on the disk. Raises DataError when they are not all there."""
    with open_plain(file) as stream:
        stream.seek(start)
        data = stream.read(stop - start)
    if len(data) != stop - start:
        raise DataError(f"{file.path} became shorter while it was read; run again when it is complete.")
    return data


class Decompressed:
    """The bytes of a file, decompressed as they are read; `consumed` is how far it is in the compressed ones."""

    def __init__(self, raw: BinaryIO, suffix: str) -> None:
        self._raw = raw
        self._read: Callable[[int], bytes] = raw.read
        self._damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        if suffix == ".gz":
            self._read = gzip.GzipFile(fileobj=raw).read
        elif suffix == ".zst":
            self._read = _ZstdFrames(raw).read
            self._damages = (EOFError, _import_zstandard().ZstdError)

    @property
    def consumed(self) -> int:
        """How many bytes of the file have been used."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end. Raises DamagedStreamError."""
        parts, left = [], size
        try:
            while left and (part := self._read(left)):
                parts.append(part)
                left -= len(part)
        except self._damages as error:
            raise DamagedStreamError(f"does not decompress ({error})") from error
        return b"".join(parts)


class _ZstdFrames:
    """A .zst file, of one frame or several. zstandard's own reader takes a file that is cut off for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decompressor = _import_zstandard().ZstdDecompressor()
        self._frame: Any = None
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end. Raises EOFError where a frame is cut off."""
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
    """Read a file's text, decompressing it where its name says so.

    Raises DataError when it cannot be opened, ConfigError when what decompresses it is not installed.
    """
    with open_plain(file) as raw:
        yield Decompressed(raw, file.path.suffix.lower())


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("a .zst file takes the package zstandard; pip install 'echelon[data]'.") from error
    return zstandard
