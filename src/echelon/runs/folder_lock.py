"""Who may write to a run folder: one live process, which holds its lock."""

import errno
import fcntl
import os
import platform
import time
from pathlib import Path

from echelon.errors import ConfigError, EchelonError, explain_storage_error, is_disk_full

# `is_held` takes the lock itself for a moment; a process that wants it then tries for as long.
_LOOK_SECONDS = 0.2


class FolderLock:
    """The lock of one folder, held by this process or by none of its objects. Making the object touches nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self, patience_seconds: float) -> None:
        """Hold the folder for this process until `release()` or its end. A live run raises ConfigError with its pid.

        `patience_seconds`: how long one that is about to end may take to let go of it.
        """
        try:
            if not os.access(self._folder, os.W_OK | os.X_OK):  # a lock that is there already would open all the same
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            fd = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise explain_unusable(self._folder, "written to", error) from error
        deadline = time.monotonic() + max(patience_seconds, _LOOK_SECONDS)
        while not (held := _try_lock(fd)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not held:
            holder = os.read(fd, 100).decode("utf-8", "replace").strip() or "unknown"
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

    def is_held(self) -> bool:
        """Whether a live process holds the folder, this one included."""
        try:
            fd = os.open(self._folder / ".lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def release(self) -> None:
        """Let go of the folder; harmless when it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def explain_unusable(folder: Path, what: str, error: OSError) -> EchelonError:
    """A full disk is nobody's mistake (exit code 1); a folder that cannot be used is the request's (2)."""
    if is_disk_full(error):
        return EchelonError(f"run.dir={folder}: {explain_storage_error(error, folder)}.")
    reason = error.strerror or error
    return ConfigError(f"run.dir={folder} cannot be {what}: {reason}; choose a folder you can write to.")
