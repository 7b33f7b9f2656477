"""Which files of a folder an operation depends on: those that it opens or asks about, and the folders that it lists."""

import os
import re
import shutil
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


class Restorer:
    """Keeps a copy of a folder, and writes again what differs from it in the folder."""

    def __init__(self, folder: Path, aside: Path) -> None:
        """`aside`: where the copy is made, which must not exist."""
        self._folder, self._aside = folder, Path(shutil.copytree(folder, aside))
        self._written: dict[str, _Stamp] = {}

    def restore(self) -> None:
        """Make the folder as it was, but for times of change."""
        found = _stamp(self._folder)
        changed = {name for name, stamp in found.items() if stamp != self._written.get(name)}
        for name in sorted(changed, reverse=True):  # a folder comes after its entries
            path = self._folder / name
            (path.rmdir if stat.S_ISDIR(found[name][0]) else path.unlink)()
        for name in sorted(_stamp(self._aside).keys() - (found.keys() - changed)):
            if (self._aside / name).is_dir():
                (self._folder / name).mkdir()
            else:
                shutil.copy2(self._aside / name, self._folder / name)
        self._written = _stamp(self._folder)


_Stamp = tuple[int, ...]
"""What differs after a file was written: its kind, inode, size and time of change. Of a folder, only the kind."""


def _stamp(folder: Path) -> dict[str, _Stamp]:
    stamps: dict[str, _Stamp] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            found = os.lstat(path)
            rest = () if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size, found.st_mtime_ns)
            stamps[os.path.relpath(path, folder)] = (found.st_mode, *rest)
    return stamps


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
