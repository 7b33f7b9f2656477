"""Which files of a folder an operation depends on: those that it opens or asks about, and the folders that it lists."""

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

State = dict[str, bytes | str]
"""What is in a folder: the content of each file, or a word for what has no content, by name."""

_LISTS = ("os.listdir", "os.scandir")
_EVENTS = ("open", *_LISTS)
_ASKS = ("stat", "lstat", "access", "readlink")  # these raise no audit event
_TIME = re.compile(rb'"time": [0-9.]+')
_LARGEST = 2**24


@dataclass
class Touched:
    """What an operation opens, asks about and lists in `folder`, by names relative to it."""

    folder: Path
    files: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)

    def note(self, given: object, listed: bool) -> None:
        """Note a path that the operation gave to the system."""
        if isinstance(given, (str, os.PathLike)):
            path = Path(os.path.abspath(given))
            if path.is_relative_to(self.folder):
                (self.lists if listed else self.files).add(path.relative_to(self.folder).as_posix())

    def find_changes(self, before: State, now: State) -> list[str]:
        """Return the names that are touched and differ, and the folders that are listed and have other entries."""
        files = [name for name in self.files if before.get(name) != now.get(name)]
        return files + [name for name in self.lists if _list(before, name) != _list(now, name)]


def _list(state: State, folder: str) -> set[str]:
    return {name for name in state if os.path.dirname(name) == ("" if folder == "." else folder)}


def read_state(folder: Path, undamaged: tuple[str, ...]) -> State:
    """Read a folder, of the files in `undamaged` subfolders only the sizes. The times in its files are left out."""
    state: State = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            relative = path.relative_to(folder)
            state[relative.as_posix()] = _read(path, relative.parts[0] not in undamaged)
    return state


def _read(path: Path, content: bool) -> bytes | str:
    found = path.lstat()
    if content and stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST:
        return _TIME.sub(b"", path.read_bytes())
    return f"{stat.filemode(found.st_mode)} {found.st_size if stat.S_ISREG(found.st_mode) else ''}"


@dataclass
class Known:
    """An operation on the undamaged folder: the states before and after it, what it touches, and its result."""

    before: State
    after: State
    touched: Touched
    parts: dict[str, str]

    def holds(self, now: State) -> bool:
        """Whether all that the operation touches is as it was, and its result thus the same."""
        return not self.touched.find_changes(self.before, now)

    def apply(self, now: State) -> State:
        """Return the state that the operation would leave."""
        changed = {name for name, _ in self.before.items() ^ self.after.items()}
        kept = {name: content for name, content in now.items() if name not in changed}
        return kept | {name: self.after[name] for name in changed & self.after.keys()}


_recording: list[Touched] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _recording and event in _EVENTS:
        for touched in tuple(_recording):
            touched.note(arguments[0], event in _LISTS)


@cache
def _listen() -> None:
    sys.addaudithook(_hear)  # which cannot be removed


def note_use(name: str) -> None:
    """Note that the operation uses what is in memory, which has this name in the state."""
    for touched in _recording:
        touched.files.add(name)


@contextmanager
def record(folder: Path) -> Iterator[Touched]:
    """Record what the block touches in a folder, in all threads of this process."""
    _listen()
    touched = Touched(folder)
    before = {name: getattr(os, name) for name in _ASKS}

    def ask(name: str) -> Any:
        def asked(path: Any, *arguments: Any, **options: Any) -> Any:
            touched.note(path, False)
            return before[name](path, *arguments, **options)

        return asked

    for name in _ASKS:
        setattr(os, name, ask(name))
    _recording.append(touched)
    try:
        yield touched
    finally:
        _recording.remove(touched)
        for name in _ASKS:
            setattr(os, name, before[name])
