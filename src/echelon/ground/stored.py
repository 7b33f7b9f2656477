"""The small files of a run: written atomically, and validated when read.

A file may be truncated, or contain other bytes or JSON of another type, or be a pipe or a device: reading it here
returns the expected type, or raises an OSError or a ValueError with the fault. No file is read beyond a limit of bytes.
"""

import errno
import io
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from echelon.ground.sizes import render_bytes

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""The largest file that is read as one document: JSON, a template, a tokenizer."""

MAX_ROWS_BYTES = 2**31
"""The largest file of lines that is read: four million rows of metrics.jsonl, for example."""

_PART_BYTES = 2**20
# What a shell passes for `<(command)` and `-`: pipes that the user has opened, and that have an end.
_PASSED = (Path("/dev/fd"), Path("/proc/self/fd"))

Row = dict[str, Any]
"""A line of a file of JSON lines."""


def write_text(path: Path, text: str) -> None:
    """Replace the file atomically, like `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file atomically: a reader sees the old content or the new one, also after a power failure.

    Several processes and threads may write the same file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace the file atomically with `value` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def sync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that a later rename survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read it. Raises OSError, also unless it is a regular file, or a pipe that the shell has passed.

    Others may have made the file: a FIFO would wait for a writer, and a device might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) and (path.parent in _PASSED or path == Path("/dev/stdin")):
            os.set_blocking(descriptor, True)
        elif stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        elif not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_to_append(path: Path) -> io.FileIO:
    """Open a file to append to it, unbuffered; it is created if absent. Raises OSError, also for a FIFO."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.set_blocking(descriptor, True)
        return io.FileIO(descriptor, "ab")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also if it has more than `limit` bytes."""
    with open_regular(path) as file:
        is_larger = os.fstat(file.fileno()).st_size > limit
        content = b"" if is_larger else read_up_to(file, limit)
    if is_larger or len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {render_bytes(limit)}", str(path))
    return content


def read_up_to(file: IO[bytes] | io.BufferedIOBase, limit: int) -> bytes:
    """The rest of an open file, or a beginning of more than `limit` bytes; memory is taken only for what there is."""
    parts, num_bytes = list[bytes](), 0
    while num_bytes <= limit and (part := file.read(_PART_BYTES)):
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts)


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The content of a regular file in UTF-8. Raises OSError as `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, limit).decode("utf-8")


def check_readable(folder: Path) -> None:
    """Check the files of a folder that a library will read: regular files only, and texts of at most MAX_BYTES.

    Raises ValueError with the name of the file.
    """
    for path in sorted(folder.iterdir()):
        is_text = path.suffix in (".json", ".jinja", ".txt")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path.name} is not a regular file")
        if is_text and path.is_file() and path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.name} is larger than {render_bytes(MAX_BYTES)}")


def read_json(path: Path, limit: int = MAX_BYTES) -> Any:
    """The value of a JSON file. Raises OSError, or ValueError for invalid JSON."""
    return parse_json(read_bytes(path, limit))


def parse_json(content: bytes) -> Any:
    """The value of JSON in UTF-8. Raises ValueError for invalid JSON."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def read_as(path: Path, kind: type[T]) -> T:
    """The value of a JSON file, validated as a type. Raises OSError, or ValueError as `parse_as`."""
    return parse_as(read_bytes(path), kind)


def parse_as(content: bytes, kind: type[T]) -> T:
    """The value of JSON, validated as a type such as a TypedDict. Raises ValueError with a line on the first fault."""
    try:
        return validator_of(kind).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key}: {first['msg']}" if key else first["msg"]) from error


def validator_of(kind: type[T]) -> TypeAdapter[T]:
    """The validator of a type. It takes milliseconds to make, and is kept."""
    return _make_validator(kind)


_make_validator: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass(frozen=True)
class Rows:
    """The content of a file of JSON lines: the valid rows, and the numbers of invalid lines, from 1."""

    path: Path
    rows: tuple[Row, ...]
    bad: tuple[int, ...] = ()
    fault: str | None = None

    def describe_bad(self) -> str | None:
        """The message about skipped lines; None if there are none."""
        if self.fault is not None:
            return f"skipping {self.path}, which cannot be read ({self.fault})"
        if not self.bad:
            return None
        more = f" and {len(self.bad) - 1} more" if len(self.bad) > 1 else ""
        return f"{self.path}: skipping line {self.bad[0]}{more}, which cannot be read"


def read_rows(path: Path, is_row: Callable[[Row], bool]) -> Rows:
    """The rows of a file of JSON lines; empty if the file does not exist.

    A last line without a newline was cut off by a power failure or is being written: it is ignored.
    """
    try:
        content = read_bytes(path, MAX_ROWS_BYTES)
    except FileNotFoundError:
        return Rows(path, ())
    except OSError as error:
        return Rows(path, (), fault=error.strerror or str(error))
    rows, bad = list[Row](), list[int]()
    for number, line in enumerate(whole_lines(content), start=1):
        if (row := parse_row(line, is_row)) is None:
            bad.append(number)
        else:
            rows.append(row)
    return Rows(path, tuple(rows), tuple(bad))


def whole_lines(content: bytes) -> Iterator[bytes]:
    """The complete lines of a file, including their newlines."""
    start = 0
    while (stop := content.find(b"\n", start) + 1) > 0:
        yield content[start:stop]
        start = stop


def parse_row(line: bytes, is_row: Callable[[Row], bool]) -> Row | None:
    """The object in a line of JSON; None if it is invalid or `is_row` rejects it."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and is_row(row) else None
