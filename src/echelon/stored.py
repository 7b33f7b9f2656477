"""The small files of a run: written atomically, and validated when read.

A file may be truncated, or contain other bytes or JSON of another type: reading it here returns the expected type, or
raises an OSError or a ValueError with the fault.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

Row = dict[str, Any]
"""A line of a file of JSON lines."""


def write_text(path: Path, text: str) -> None:
    """Replace the file atomically: a reader sees the old text or the new one, also after a power failure.

    Several processes and threads may write the same file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
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


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises OSError, or ValueError for invalid JSON."""
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> Any:
    """The value of JSON in UTF-8. Raises ValueError for invalid JSON."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def read_as(path: Path, kind: type[T]) -> T:
    """The value of a JSON file, validated as a type: a dataclass, a TypedDict, a mapping of numbers.

    Raises OSError, or ValueError with one line about the first fault.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error


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
        content = path.read_bytes()
    except FileNotFoundError:
        return Rows(path, ())
    except OSError as error:
        return Rows(path, (), fault=error.strerror or str(error))
    found = [(number, parse_row(line, is_row)) for number, line in enumerate(whole_lines(content), start=1)]
    rows = tuple(row for _, row in found if row is not None)
    return Rows(path, rows, tuple(number for number, row in found if row is None))


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
