"""Files of the data in an object store: found by their address, and fetched whole, as they were when found."""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import has_magic
from pathlib import Path

from echelon.ground.errors import ConfigError, DataError, EchelonError
from echelon.ground.object_store import ObjectInfo, ObjectStore, ObjectStoreError, retried
from echelon.learn.data.readers.record import SourceFile

logger = logging.getLogger(__name__)

RETRY_DELAYS_SECONDS = (1.0, 4.0, 15.0, 60.0)
"""The waits between attempts at a request. After the last one fails, the run stops; it can be resumed."""

SLOW_SECONDS = 10.0
"""What takes longer is named in a line, because a step or the start of a run waits for it."""


def is_address(path: str) -> bool:
    """Whether the path of a source is an address such as s3://bucket/file or https://host/file."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path) is not None


def find_objects(address: str, where: str) -> dict[str, ObjectInfo]:
    """Return the objects that an address stands for: one, all below a folder, or those that a glob matches; sorted.

    `where` starts each message. Raises DataError if there is none, ConfigError if the store refuses access or its
    package is missing, EchelonError if it fails.
    """
    folder, _, name = _before_magic(address)
    try:
        store, objects = ObjectStore(folder, where), dict[str, ObjectInfo]()

        def attempt() -> None:
            objects.update(store.find(name))

        with slowness_told(f"listing {address}"):
            persist(attempt, address)
    except ObjectStoreError as error:
        if error.kind == "absent":
            raise DataError(
                f"{where}: no such object; give an object, a folder, or a glob such as {folder}/*."
            ) from None
        problem = f"{where} cannot be listed ({error}); "
        if error.kind == "refused":
            raise ConfigError(
                f"{problem}check the address, and that the credentials in the environment allow to list and read it."
            ) from None
        raise EchelonError(f"{problem}run the same command again when the server answers.") from None
    if not any(entry.size for entry in objects.values()):
        raise DataError(f"{where}: no object there has any content; give an object, a folder, or a glob.")
    return objects


def _before_magic(address: str) -> tuple[str, str, str]:
    """Cut an address before the first part that is a glob, or else before its last part."""
    protocol, _, path = address.rstrip("/").partition("://")
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if has_magic(part)), len(parts) - 1)
    return f"{protocol}://{'/'.join(parts[:first])}", "/", "/".join(parts[first:])


def join_infos(infos: Iterable[ObjectInfo]) -> ObjectInfo:
    """Return the size and version of a file that is stored as several objects: Megatron's .idx with its .bin."""
    parts = list(infos)
    return ObjectInfo(sum(info.size for info in parts), " ".join(info.version for info in parts))


def _list_parts(file: SourceFile, path: Path | str) -> list[str]:
    """Return the names of what a file at a path is stored as."""
    name = str(path)
    return [name, f"{name.removesuffix('.idx')}.bin"] if file.format == "megatron" else [name]


def fetch(file: SourceFile, folder: Path) -> SourceFile:
    """Copy a file of an address into a folder, and return the copy; a file of this machine is returned as it is.

    Requests that fail are named and repeated. Raises DataError if the file is not the one that was listed: another
    version, another size, or gone; EchelonError if the store keeps failing.
    """
    if not is_address(file.name):
        _check_local(file)
        return file
    parent, _, name = file.name.rpartition("/")
    store = ObjectStore(parent, "data.train")
    path = folder / f"{hashlib.sha256(file.name.encode()).hexdigest()[:8]}-{name[-100:]}"
    expected = ObjectInfo(file.size, file.revision or "")

    parts = list(zip(_list_parts(file, name), map(Path, _list_parts(file, path)), strict=True))

    def attempt() -> None:
        stated = [store.stat(part) for part, _ in parts]
        _check_same(file, join_infos(stated), expected)
        for (part, copy), info in zip(parts, stated, strict=True):
            store.download(part, copy, info.size)
        if (size := sum(copy.stat().st_size for _, copy in parts)) != file.size:
            arrived = f"only {size:,} of" if size < file.size else "more than"
            raise ObjectStoreError(f"{arrived} its {file.size:,} bytes arrived", "failed")
        _check_same(file, join_infos(store.stat(part) for part, _ in parts), expected)

    def remove() -> None:
        for _, copy in parts:
            copy.unlink(missing_ok=True)

    try:
        persist(attempt, file.name)
    except ObjectStoreError as error:
        remove()
        if error.kind == "absent":
            raise _changed(file, "it is gone") from None
        fix = "when the server answers" if error.kind == "failed" else "with credentials that allow to read it"
        raise EchelonError(
            f"{file.name} cannot be fetched ({error}); resume the run with the same command {fix}."
        ) from None
    except BaseException:
        remove()
        raise
    return replace(file, path=path)


def persist(attempt: Callable[[], None], address: str) -> None:
    """Call `attempt` until it succeeds, naming each failure; raise the last one, or any refusal."""

    def tell(error: ObjectStoreError, delay: float) -> None:
        logger.warning(f"data: {address}: {error}; again in {delay:g} s")

    retried(attempt, RETRY_DELAYS_SECONDS, time.sleep, tell)


@contextmanager
def slowness_told(what: str) -> Iterator[None]:
    """Log a line if the block takes long. `what`: what it does, for example `preparing FILE`."""
    told = threading.Timer(SLOW_SECONDS, lambda: logger.info(f"data: still {what}"))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def _check_same(file: SourceFile, found: ObjectInfo, wanted: ObjectInfo) -> None:
    if found.size != wanted.size:
        raise _changed(file, f"it has {found.size:,} bytes and had {wanted.size:,}")
    if found.version != wanted.version:
        raise _changed(file, f"its version is {found.version} and was {wanted.version}")


def _check_local(file: SourceFile) -> None:
    """Raise DataError for a file of this machine that is not the one that was listed."""
    if file.format == "hub" or file.rows is not None:
        return
    try:
        stats = [Path(part).stat() for part in _list_parts(file, file.path)]
    except OSError as error:
        raise _changed(file, f"it cannot be read: {error.strerror}") from error
    if (sum(one.st_size for one in stats), max(one.st_mtime_ns for one in stats)) != (file.size, file.mtime_ns):
        raise _changed(file, "its size or time is another one")


def _changed(file: SourceFile, how: str) -> DataError:
    shown = file.name if is_address(file.name) else file.path
    return DataError(
        f"{shown} changed since the data was listed: {how}. Restore it and resume the run, or start a new one with "
        "--fresh."
    )
