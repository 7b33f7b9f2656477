"""A lock on a file, which ends with the process that holds it."""

import errno
import fcntl
import os
import platform
from contextlib import suppress
from pathlib import Path

from echelon.ground.stored import read_bytes

# What `flock` says on a file system without locks: NFS without a lock daemon, Lustre without the option `flock`.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class FileLock:
    """A lock on a file, held by one process of all machines. The constructor does no I/O.

    On a file system without locks, the process that creates the file NAME-held holds it. If that process was killed,
    another one of its machine notices; on other machines the lock then counts as held until the file is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = path.with_name(f"{path.name}-held")
        """The file that exists while the lock is held, on a file system without locks."""
        self._descriptor: int | None = None
        self._has_mark = False

    def take(self) -> bool:
        """Hold the lock until `release()` or the end of this process, if nobody holds it. Raises OSError."""
        fd, is_taken = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), False
        try:
            is_free = _flock(fd, fcntl.LOCK_EX)
            is_taken = self._create_mark() if is_free is None else is_free
            if is_taken:
                os.ftruncate(fd, 0)
                os.write(fd, _own_name())
        except OSError:
            if is_taken:  # the disk is full
                self.path.unlink(missing_ok=True)
            is_taken = False
            self._remove_mark()
            raise
        finally:
            if not is_taken:
                os.close(fd)
        if is_taken:
            self._descriptor = fd
        return is_taken

    def read_holder(self) -> str | None:
        """Return the live process, possibly this one, that holds the lock, as PID on HOST; None if there is none."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
        except OSError:
            return None
        try:
            if (taken := _flock(fd, fcntl.LOCK_SH)) is None:
                return self._read_mark()
            return None if taken else os.read(fd, 100).decode("utf-8", "replace").strip() or "unknown"
        finally:
            os.close(fd)

    def release(self) -> None:
        """Release the lock, if held."""
        self._remove_mark()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _remove_mark(self) -> None:
        if self._has_mark:
            self._has_mark = False
            with suppress(OSError):  # moved away with its folder
                self.mark.unlink()

    def _create_mark(self) -> bool:
        """Create the mark; False if a live process has it."""
        if self._read_mark() is not None:
            return False
        try:
            fd = os.open(self.mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:  # another process was faster
            return False
        self._has_mark = True
        with os.fdopen(fd, "wb") as stream:
            stream.write(_own_name())
        return True

    def _read_mark(self) -> str | None:
        """The process that has the mark; None if there is none. Removes that of a process of here that has ended."""
        try:
            text = read_bytes(self.mark).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return None
        except OSError:  # not a file
            return "unknown"
        pid, _, host = text.partition(" on ")
        if host != platform.node() or not pid.isdecimal() or not _has_ended(int(pid), self.path):
            return text or "unknown"
        aside = self.mark.with_name(f"{self.mark.name}-{os.getpid()}")
        with suppress(FileNotFoundError):  # another process has removed it
            os.rename(self.mark, aside)
            if read_bytes(aside).decode("utf-8", "replace").strip() != text:  # it was already a new one
                os.rename(aside, self.mark)
                return "unknown"
            aside.unlink()
        return None


def describe_mark(lock: FileLock) -> str:
    """The end of a message about a lock that is held, where its process may have ended unnoticed."""
    if not lock.mark.exists():
        return ""
    return f" This file system has no locks (flock), so if that process has ended, remove {lock.mark}."


def is_open(pid: int, path: Path) -> bool:
    """Whether a process of this machine has a file open. False for one whose open files this user cannot see.

    Its id may belong to another container.
    """
    if not Path("/proc/self/fd").exists():  # macOS
        return _is_alive(pid)
    with suppress(OSError):
        return any(_is_same(link, path) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _has_ended(pid: int, path: Path) -> bool:
    """Whether the process that opened a file is gone; its id may be that of another process meanwhile."""
    try:
        return not (_is_alive(pid) and any(_is_same(link, path) for link in Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:  # of another user, or macOS
        return not _is_alive(pid)


def _is_same(link: Path, path: Path) -> bool:
    with suppress(OSError):  # closed meanwhile
        return link.samefile(path)
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def _own_name() -> bytes:
    return f"{os.getpid()} on {platform.node()}\n".encode()


def _flock(fd: int, kind: int) -> bool | None:
    """Whether this kind of lock was taken; None if the file system has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
