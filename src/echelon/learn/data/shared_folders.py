"""Prepared folders in an object store: prepared once, and downloaded by every other machine (`data.prepared_remote`).

    URL/KEY.json      the marker: the size and checksum of every file of the folder
    URL/KEY/...       the files of the prepared folder KEY

The key is a hash of everything that determines the content, so whoever writes a folder writes the same. The marker is
written last: without it there is no folder.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from echelon.ground.checksums import compare_files, file_digest
from echelon.ground.errors import ConfigError
from echelon.ground.object_store import ObjectStore, ObjectStoreError, retried
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import parse_json, sync_path

logger = logging.getLogger(__name__)

_KEY = "data.prepared_remote"
_FORMAT = 1
_RETRY_DELAYS_SECONDS = (1.0, 4.0, 15.0)

_Entries = list[tuple[str, int, str]]


class SharedFolders:
    """The prepared folders at an address. A failing store is reported, and the data is then prepared here."""

    def __init__(self, url: str) -> None:
        """Makes no request. Raises ConfigError for an unsupported protocol."""
        self._url = url
        self._store = ObjectStore(url, _KEY)
        self._is_settled = self._is_damaged = False

    def bring(self, folder: Path) -> bool:
        """Download the prepared folder with this name, if the store has it intact. Returns whether it did.

        Only one process may do so at a time. Raises ConfigError if the store refuses access, OSError if the disk is
        full.
        """
        writing, faults = folder.with_suffix(".downloading"), list[str]()
        entries: _Entries | None = None

        def attempt() -> None:
            nonlocal entries
            entries = self._read_marker(folder.name)
            if entries is None:
                return
            logger.info(f"data: downloading {folder.name} ({_describe_size(entries)}) from {self._url}")
            shutil.rmtree(writing, ignore_errors=True)
            faults[:] = self._download(folder.name, entries, writing)

        try:
            if not self._retried(attempt, "the data is prepared here"):
                self._is_settled = True
                return False
            if entries is None:
                return False
            if faults:
                self._is_damaged = True
                logger.warning(f"data: {self._url}/{folder.name} is damaged ({faults[0]}); the data is prepared here")
                return False
            for name, _, _ in entries:
                sync_path(writing / name)
            writing.rename(folder)
            sync_path(folder.parent)
            self._is_settled = True
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        return True

    def send(self, folder: Path) -> None:
        """Upload a prepared folder, unless it was brought from there or the store has files of the same sizes.

        Raises ConfigError if the store refuses access.
        """
        if not self._is_settled:
            self._retried(lambda: self._upload(folder), "other machines prepare the data themselves")

    def _retried(self, attempt: Callable[[], None], otherwise: str) -> bool:
        """Make an attempt until it succeeds; returns whether it did. `otherwise`: what happens if it does not."""
        try:
            retried(attempt, _RETRY_DELAYS_SECONDS, time.sleep)
        except ObjectStoreError as error:
            described = f"{_KEY}={self._url} cannot be used ({error})"
            if error.kind != "failed":
                raise ConfigError(
                    f"{described}; check the address, that its bucket exists, and that the credentials in the "
                    "environment allow to list, read and write objects."
                ) from None
            logger.warning(f"data: {described}; {otherwise}")
            return False
        return True

    def _read_marker(self, name: str) -> _Entries | None:
        """The files of a folder in the store; None if there is none that this version can read."""
        if (content := self._store.read(f"{name}.json")) is None:
            return None
        try:
            return _parse_marker(parse_json(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning(f"data: {self._url}/{name}.json cannot be read ({error}); the data is prepared here")
            return None

    def _download(self, name: str, entries: _Entries, into: Path) -> list[str]:
        """Download the files of a folder; returns a phrase for each that is missing or differs from the marker."""
        for file, num_bytes, _ in entries:
            (into / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._store.download(f"{name}/{file}", into / file, num_bytes)
            except ObjectStoreError as error:
                if error.kind != "absent":
                    raise
        return compare_files(into, entries, checksums=True)

    def _upload(self, folder: Path) -> None:
        sizes = {_name_in(folder, path): path.stat().st_size for path in _list(folder)}
        marked = {name: num_bytes for name, num_bytes, _ in self._read_marker(folder.name) or ()}
        if sizes == marked == self._store.sizes(folder.name) and not self._is_damaged:
            return
        entries = [(_name_in(folder, path), path.stat().st_size, file_digest(path)) for path in _list(folder)]
        logger.info(f"data: uploading {folder.name} ({_describe_size(entries)}) to {self._url}")
        for name, _, _ in entries:
            self._store.upload(folder / name, f"{folder.name}/{name}")
        files = {name: {"bytes": num_bytes, "sha256": digest} for name, num_bytes, digest in entries}
        self._store.write(f"{folder.name}.json", json.dumps({"format": _FORMAT, "files": files}, indent=1).encode())


def _list(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _name_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _describe_size(entries: _Entries) -> str:
    return render_bytes(sum(num_bytes for _, num_bytes, _ in entries))


def _parse_marker(content: Any) -> _Entries:
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']!r:.40}, and this version reads {_FORMAT}")
    entries = [(str(name), int(entry["bytes"]), str(entry["sha256"])) for name, entry in content["files"].items()]
    for name, _, _ in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name[:50]!r} is not a file of the folder")
    return entries
