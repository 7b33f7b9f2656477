"""Access to objects under an address such as s3://bucket/run, through fsspec, with one-line error messages.

Credentials come from the environment or from fsspec's own configuration, and are never read here.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from echelon.ground.errors import ConfigError, EchelonError, is_disk_full
from echelon.ground.extras import missing_package
from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import MAX_BYTES, read_up_to, write_text

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

# The package that fsspec imports for a protocol, and the extra that installs it.
EXTRAS = {
    "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"),
    "http": ("aiohttp", "data"), "https": ("aiohttp", "data"),
}  # fmt: skip
_STALL_SECONDS = 60.0  # without a byte from an HTTP server
_VERSIONS = ("ETag", "etag", "generation", "VersionId", "blob_id", "Last-Modified", "LastModified", "updated", "mtime")
_CHUNK_BYTES = 2**23
_MAX_REASON = 300

Kind = Literal["absent", "refused", "failed"]


class ObjectStoreError(EchelonError):
    """A request to an object store failed. `kind`: `absent` for a missing object, `refused` without permission."""

    def __init__(self, message: str, kind: Kind) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes and version of an object. The version changes with the content; empty if the server has none."""

    size: int
    version: str


class ObjectStore:
    """Objects by name, a path below `url`. Every method raises ObjectStoreError, without secrets in its message."""

    def __init__(self, url: str, key: str = "checkpoint.remote") -> None:
        """Makes no request. Raises ConfigError, naming the recipe key `key`, for an unsupported protocol."""
        import fsspec.core
        from fsspec.implementations.local import LocalFileSystem

        self.url = url
        protocol = url.partition("://")[0]
        options: dict[str, Any] = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            if protocol in ("http", "https"):
                options["client_kwargs"] = _client_options()
            # No listing cache: another process may write here too.
            self._system, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except ImportError:
            if protocol in EXTRAS:
                raise missing_package(f"{key}={url}", *EXTRAS[protocol], "or use another address") from None
            raise ConfigError(
                f"{key}={url} requires the fsspec package for {protocol}, which is not installed; install it, or use "
                "another address."
            ) from None
        except ValueError:
            raise ConfigError(
                f"{key}={url}: fsspec has no protocol {protocol}; use s3, gs, file or another of fsspec's."
            ) from None
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # it prints a traceback for what is raised too
        if (loop := getattr(self._system, "loop", None)) is not None:
            # At the end of a process, asyncio would name each request that is given up.
            loop.set_exception_handler(lambda loop, context: None)
        self._is_local = isinstance(self._system, LocalFileSystem)
        self._is_http = protocol in ("http", "https")

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object, at most MAX_BYTES; None if it does not exist."""
        try:
            with self._translated_errors(), self._system.open(self._path(name), "rb") as source:
                content = read_up_to(source, MAX_BYTES)
        except ObjectStoreError as error:
            if error.kind == "absent":
                return None
            raise
        if len(content) > MAX_BYTES:
            raise ObjectStoreError(f"{name} is larger than {render_bytes(MAX_BYTES)}", "failed")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object, UTF-8 text, atomically."""
        with self._translated_errors():
            if self._is_local:  # a local file is not written atomically
                path = Path(self._path(name))
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, content.decode())
            else:
                self._system.pipe_file(self._path(name), content)

    def write_json(self, name: str, value: Any) -> None:
        """Create or replace an object atomically with `value` as indented JSON."""
        self.write(name, (json.dumps(value, indent=2) + "\n").encode())

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of every object below a name, by its path relative to it."""
        prefix = self._path(name)
        with self._translated_errors():
            entries = self._system.find(prefix, detail=True)
        return {
            path[len(prefix) + 1 :]: int(entry["size"]) for path, entry in entries.items() if len(path) > len(prefix)
        }

    def find(self, pattern: str) -> dict[str, ObjectInfo]:
        """Return the objects that a name or glob stands for, by address, sorted: of a folder, all objects below it."""
        path = self._path(pattern)
        with self._translated_errors():
            # A question mark begins the query of a URL.
            if "*" in pattern or "[" in pattern if self._is_http else has_magic(pattern):
                entries = self._system.glob(path, detail=True)
            else:
                entry = self._system.info(path)
                entries = self._system.find(path, detail=True) if entry["type"] == "directory" else {path: entry}
        return {
            str(self._system.unstrip_protocol(name)): _read_info(entry)
            for name, entry in sorted(entries.items())
            if entry["type"] == "file"
        }

    def stat(self, name: str) -> ObjectInfo:
        """Ask for the size and the version of an object."""
        with self._translated_errors():
            return _read_info(self._system.info(self._path(name)))

    def upload(self, path: Path, name: str) -> None:
        """Create or replace an object from a file. The client library verifies the transfer if its protocol can."""
        with self._translated_errors():
            self._system.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path, num_bytes: int) -> None:
        """Write an object's content to a file, of a longer one than `num_bytes` that many and up to a block more.

        So the size of the file tells a longer or shorter one. OSError: the disk here is full.
        """
        with self._translated_errors(), suppress(_LongerError):
            self._system.get_file(self._path(name), str(path), callback=_make_counter(num_bytes))

    def digest(self, name: str, num_bytes: int) -> tuple[int, str]:
        """Read an object of `num_bytes`, or the start of a larger one; return the bytes read and their SHA-256."""
        digest, count = hashlib.sha256(), 0
        with self._translated_errors(), self._system.open(self._path(name), "rb", block_size=_CHUNK_BYTES) as source:
            while count <= num_bytes and (chunk := source.read(_CHUNK_BYTES)):
                digest.update(chunk)
                count += len(chunk)
        return count, digest.hexdigest()

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are not an error."""
        for name in names:
            try:
                with self._translated_errors():
                    self._system.rm_file(self._path(name))
            except ObjectStoreError as error:
                if error.kind != "absent":
                    raise

    def remove_folder(self, name: str) -> None:
        """Remove every object below a name."""
        self.remove(f"{name}/{size}" for size in self.sizes(name))
        if self._is_local:  # the folders themselves
            shutil.rmtree(self._path(name), ignore_errors=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Turn an error into ObjectStoreError. Client libraries have their own classes, many of them not OSError."""
        try:
            yield
        except Exception as error:
            if is_disk_full(error):
                raise
            if self._is_http and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # whatever keeps fsspec's client from an object
            # Without the cause: the library's full message may contain the request with its signature.
            raise ObjectStoreError(describe_failure(error), _find_kind(error)) from None


def _client_options() -> dict[str, Any]:
    """The options of fsspec's HTTP client. By default, it gives up an object after 5 minutes, however large it is."""
    import aiohttp

    return {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=_STALL_SECONDS, sock_read=_STALL_SECONDS)}


class _LongerError(Exception):
    """An object has more bytes than it should have."""


def _make_counter(num_bytes: int) -> "Callback":
    """A callback that ends a download after `num_bytes`. A hub's own client has a size to end at, and ignores it."""
    from fsspec.callbacks import NoOpCallback

    class Counter(NoOpCallback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            self.value += inc
            if self.value > num_bytes:
                raise _LongerError

    return Counter()


def _read_info(entry: Mapping[str, Any]) -> ObjectInfo:
    version = next((str(entry[name]) for name in _VERSIONS if entry.get(name) is not None), "")
    return ObjectInfo(int(entry.get("size") or 0), version)


def describe_failure(error: BaseException) -> str:
    """Describe an error of an object store or a disk in one line, without anything that looks like a secret."""
    reason = (str(error).strip().splitlines() or [""])[0]
    reason = redact_text(reason)[:_MAX_REASON]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _find_kind(error: BaseException) -> Kind:
    status = getattr(error, "status", None)  # of an answer by HTTP
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "absent"
    is_refused = isinstance(error, PermissionError) or status in (401, 403) or "Credential" in type(error).__name__
    return "refused" if is_refused else "failed"


def retried(
    attempt: Callable[[], None],
    delays: Iterable[float],
    wait: Callable[[float], Any],
    tell: Callable[[ObjectStoreError, float], None] = lambda error, delay: None,
) -> None:
    """Call `attempt` until it succeeds, waiting between attempts; raise the last failure, or any refusal.

    `tell` is called with each failure after which another attempt follows, and the delay before it.
    """
    for delay in delays:
        try:
            return attempt()
        except ObjectStoreError as error:
            if error.kind != "failed":
                raise
            tell(error, delay)
        wait(delay)
    return attempt()
