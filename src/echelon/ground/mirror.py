"""Copies of folders in an object store: whole or absent there, and verified when they come back.

    FOLDER/...        the files
    MARKER            a manifest, the size and checksum of every file; beside the folder

A store has no rename, but replaces a single object atomically. So the marker is written last and removed first: without
a marker there is no copy.
"""

import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from echelon.ground.checksums import FORMAT, Files, compare_files, describe_files, list_all_files
from echelon.ground.object_store import ObjectStore, ObjectStoreError, retried
from echelon.ground.stored import sync_path

RETRY_DELAYS_SECONDS = (1.0, 4.0, 15.0)
"""The waits between attempts, where somebody waits for the copy."""

_FILES_AT_ONCE = 4


def publish(store: ObjectStore, folder: Path) -> None:
    """Upload a folder of this machine under its name, and write its marker, NAME.json. Raises as `send`."""
    sources = list_all_files(folder)
    files = describe_files(sources.values(), folder)
    send(store, folder.name, sources, files)
    write_marker(store, f"{folder.name}.json", files)


def send(
    store: ObjectStore, folder: str, sources: Mapping[str, Path], files: Files, sent: Collection[str] = ()
) -> None:
    """Upload files, each from its place in `sources`, and check their sizes in a listing.

    Those in `sent` are not sent again if the store has them with their size. Raises ObjectStoreError, also for sizes
    that differ.
    """
    there = store.sizes(folder) if sent else {}
    # One after another: client libraries send the parts of one file in parallel, and hold them in memory.
    for name, path in sources.items():
        if name not in sent or there.get(name) != files[name]["bytes"]:
            store.upload(path, f"{folder}/{name}")
    if faults := compare_sizes(files, store.sizes(folder)):
        raise ObjectStoreError(faults[0], "failed")


def write_marker(store: ObjectStore, name: str, files: Files, **values: object) -> None:
    """Write a marker, with further values."""
    store.write_json(name, {"format": FORMAT, **values, "files": files})


def compare_sizes(files: Files, sizes: Mapping[str, int], prefix: str = "") -> list[str]:
    """Compare files with a listing, where their names start with `prefix`.

    Returns a phrase for each that is missing or has another size.
    """
    sizes_found = ((name, sizes.get(f"{prefix}{name}"), entry["bytes"]) for name, entry in files.items())
    return [
        f"{name} is missing" if size is None else f"{name} has {size} bytes; {expected} were written"
        for name, size, expected in sizes_found
        if size != expected
    ]


def bring(store: ObjectStore, folder: str, files: Files, into: Path, delays: Iterable[float] = ()) -> list[str]:
    """Download a copy like `fetch`, in place of a folder."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    return fetch(store, folder, files, into, delays)


def fetch(store: ObjectStore, folder: str, files: Files, into: Path, delays: Iterable[float] = ()) -> list[str]:
    """Download files of a copy, verify and flush them; returns a phrase for each that is missing or differs.

    `delays`: the waits before further attempts. Raises ObjectStoreError if the last one fails, OSError if the disk here
    is full.
    """

    def download(name: str) -> None:
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.download(f"{folder}/{name}", path, files[name]["bytes"])
        except ObjectStoreError as error:
            if error.kind != "absent":
                raise
            path.unlink(missing_ok=True)

    def attempt() -> None:
        with ThreadPoolExecutor(_FILES_AT_ONCE) as readers:
            list(readers.map(download, files))

    retried(attempt, delays, time.sleep)
    if not (faults := compare_files(into, files, checksums=True)):
        for name in files:
            sync_path(into / name)
    return faults


def verify(store: ObjectStore, folder: str, files: Files) -> list[str]:
    """Read a copy and compare it with its checksums; return a phrase for each file that is missing or differs."""
    faults = []
    for name, entry in files.items():
        try:
            if store.digest(f"{folder}/{name}", entry["bytes"]) != (entry["bytes"], entry["sha256"]):
                faults.append(f"the contents of {name} changed after it was written")
        except ObjectStoreError as error:
            if error.kind != "absent":
                raise
            faults.append(f"{name} is missing")
    return faults


def count_bytes(files: Files) -> int:
    """Return the size of the files together."""
    return sum(entry["bytes"] for entry in files.values())
