"""The lock of a run folder, into which only one process may write."""

import errno
import os
import time
from pathlib import Path

from echelon.ground.errors import ConfigError, EchelonError, explain_storage_error, is_disk_full
from echelon.ground.file_lock import FileLock, describe_mark

# `read_holder` takes the lock for a moment, so `acquire` retries for at least this long.
_POLL_SECONDS = 0.2


class FolderLock:
    """The lock of a run folder. The constructor does no I/O."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / ".lock")

    def acquire(self, patience_seconds: float) -> None:
        """Hold the lock until `release()` or the end of this process. Raises ConfigError if a live run holds it.

        `patience_seconds`: how long to wait for a run that is about to end.
        """
        deadline = time.monotonic() + max(patience_seconds, _POLL_SECONDS)
        try:
            if not os.access(self._folder, os.W_OK | os.X_OK):  # an existing lock file opens in a read-only folder too
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            while not self._lock.take():
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"run.dir={self._folder} is in use by a live run (pid {self.read_holder() or 'unknown'}); "
                        f"wait for it, stop it, or give this run another run.name.{describe_mark(self._lock)}"
                    )
                time.sleep(0.1)
        except OSError as error:
            raise explain_unusable(self._folder, "written to", error) from error

    def read_holder(self) -> str | None:
        """Return the live process, possibly this one, that holds the lock, as PID on HOST; None if there is none."""
        return self._lock.read_holder()

    def release(self) -> None:
        """Release the lock, if held."""
        self._lock.release()


def explain_unusable(folder: Path, what: str, error: OSError) -> EchelonError:
    """Return the error for an unusable folder: exit code 1 if the disk is full, else 2, a wrong request."""
    if is_disk_full(error):
        return EchelonError(f"run.dir={folder}: {explain_storage_error(error, folder)}.")
    reason = error.strerror or error
    return ConfigError(f"run.dir={folder} cannot be {what}: {reason}; choose a folder you can write to.")
