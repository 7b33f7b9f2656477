"""Files as bytes, whether they lie there plain or compressed (.gz, .zst)."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from echelon.data.readers.record import SourceFile
from echelon.errors import ConfigError, DataError

COMPRESSIONS = (".gz", ".zst")


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
        self._stream: BinaryIO
        self._damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        if suffix == ".gz":
            self._stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif suffix == ".zst":
            zstandard = _import_zstandard()
            # Many tools write a file as several frames, one after the other.
            self._stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            self._damages = (zstandard.ZstdError,)
        else:
            self._stream = raw

    @property
    def consumed(self) -> int:
        """How many bytes of the file have been used."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end. Raises DamagedStreamError."""
        parts, left = [], size
        try:
            while left and (part := self._stream.read(left)):
                parts.append(part)
                left -= len(part)
        except self._damages as error:
            raise DamagedStreamError(f"does not decompress ({error})") from error
        return b"".join(parts)


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
