"""The lock of a run folder: only the live process that holds it may write."""

import errno
import fcntl
import os
import platform
import time
from pathlib import Path

from echelon.errors import ConfigError, EchelonError, explain_storage_error, is_disk_full

# `read_holder` takes the lock for a moment, so `acquire` retries for at least this long.
_POLL_SECONDS = 0.2


class FolderLock:
    """The lock of a run folder. The constructor does no I/O."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self, patience_seconds: float) -> None:
        """Hold the lock until `release()` or the end of this process. Raises ConfigError if a live run holds it.

        `patience_seconds`: how long to wait for a run that is about to end.
        """
        try:
            if not os.access(self._folder, os.W_OK | os.X_OK):  # an existing lock file opens in a read-only folder too
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            fd = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise explain_unusable(self._folder, "written to", error) from error
        deadline = time.monotonic() + max(patience_seconds, _POLL_SECONDS)
        while not (held := _try_lock(fd)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not held:
            holder = _read_holder(fd)
            os.close(fd)
            raise ConfigError(
                f"run.dir={self._folder} is in use by a live run (pid {holder}); "
                "wait for it, stop it, or give this run another run.name."
            )
        self._descriptor = fd
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()} on {platform.node()}\n".encode())
        except OSError as error:
            self.release()
            raise explain_unusable(self._folder, "written to", error) from error

    def read_holder(self) -> str | None:
        """Return the live process, possibly this one, that holds the lock, as PID on HOST; None if there is none."""
        try:
            fd = os.open(self._folder / ".lock", os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
        except OSError:
            return None
        try:
            return None if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
        finally:
            os.close(fd)

    def release(self) -> None:
        """Release the lock, if held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read_holder(fd: int) -> str:
    return os.read(fd, 100).decode("utf-8", "replace").strip() or "unknown"


def _try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def explain_unusable(folder: Path, what: str, error: OSError) -> EchelonError:
    """Return the error for an unusable folder: exit code 1 if the disk is full, else 2, a wrong request."""
    if is_disk_full(error):
        return EchelonError(f"run.dir={folder}: {explain_storage_error(error, folder)}.")
    reason = error.strerror or error
    return ConfigError(f"run.dir={folder} cannot be {what}: {reason}; choose a folder you can write to.")
