"""Folders for temporary files of a process. What a killed process leaves is removed by a later one."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from echelon.ground.file_lock import FileLock

_PREFIX = "echelon-"
_LOCK = ".used"
# A younger folder is not examined: its process may be about to lock it.
_LEAST_SECONDS = 60.0


@contextmanager
def scratch_folder(kind: str, place: Path | None = None) -> Iterator[Path]:
    """Create a folder for the block, accessible only to this user, and remove those of this user's killed processes.

    It is in `place`; None: the folder for temporary files. `kind`: a word in its name.
    """
    place = place or Path(tempfile.gettempdir())
    sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=place))
    lock = FileLock(folder / _LOCK)
    try:
        lock.take()
        yield folder
    finally:
        if lock.path.exists():
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def keep(folder: Path) -> None:
    """Keep a folder of `scratch_folder` after its block; no later process removes it."""
    (folder / _LOCK).unlink(missing_ok=True)


def sweep(place: Path) -> None:
    """Remove the folders that processes of this user have left: those with a lock that no live process holds."""
    for lock in place.glob(f"{_PREFIX}*-*/{_LOCK}"):
        with suppress(OSError):  # removed meanwhile
            folder, status = lock.parent, lock.lstat()
            is_old = time.time() - status.st_mtime > _LEAST_SECONDS
            is_own = status.st_uid == folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_own and is_old and FileLock(lock).read_holder() is None:
                shutil.rmtree(folder, ignore_errors=True)
