"""Prepared folders in an object store: prepared once, and downloaded by every other machine (`data.prepared_remote`).

    URL/KEY.json      the marker: the size and checksum of every file of the folder
    URL/KEY/...       the files of the prepared folder KEY

The key is a hash of everything that determines the content, so whoever writes a folder writes the same. The marker is
written last: without it there is no folder.
"""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from echelon.ground import mirror
from echelon.ground.checksums import Files, list_all_files, parse_manifest
from echelon.ground.errors import ConfigError
from echelon.ground.object_store import ObjectStore, ObjectStoreError, retried
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import sync_path

logger = logging.getLogger(__name__)

_KEY = "data.prepared_remote"


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
        files: Files | None = None

        def attempt() -> None:
            nonlocal files
            if (files := self._read_marker(folder.name)) is not None:
                size = render_bytes(mirror.count_bytes(files))
                logger.info(f"data: downloading {folder.name} ({size}) from {self._url}")
                faults[:] = mirror.bring(self._store, folder.name, files, writing)

        try:
            self._is_settled = not self._retried(attempt, "the data is prepared here")
            if self._is_settled or files is None:
                return False
            if faults:
                self._is_damaged = True
                logger.warning(f"data: {self._url}/{folder.name} is damaged ({faults[0]}); the data is prepared here")
                return False
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
            retried(attempt, mirror.RETRY_DELAYS_SECONDS, time.sleep)
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

    def _read_marker(self, name: str) -> Files | None:
        """The files of a folder in the store; None if there is none that this version can read."""
        if (content := self._store.read(f"{name}.json")) is None:
            return None
        try:
            return parse_manifest(content)[1]
        except ValueError as error:
            logger.warning(f"data: {self._url}/{name}.json cannot be read ({error}); the data is prepared here")
            return None

    def _upload(self, folder: Path) -> None:
        sizes = {name: path.stat().st_size for name, path in list_all_files(folder).items()}
        marked = {name: entry["bytes"] for name, entry in (self._read_marker(folder.name) or {}).items()}
        if sizes == marked == self._store.sizes(folder.name) and not self._is_damaged:
            return
        logger.info(f"data: uploading {folder.name} ({render_bytes(sum(sizes.values()))}) to {self._url}")
        mirror.publish(self._store, folder)
