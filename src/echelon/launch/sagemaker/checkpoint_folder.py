"""The checkpoint folder of a container, which SageMaker copies to S3: prepared data in it, and what is removed there.

All of it comes back at every start, so a restart need not tokenize again. Data is prepared elsewhere, on the largest
disk, since half-written files would be copied again and again.

SageMaker copies new files to S3 but removes none: checkpoints that `checkpoint.keep_last` has removed would cost money,
and come back. So would what it copies of a checkpoint while that is written, replaced or removed, in a folder of
another name.
"""

import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from echelon.ground.checksums import list_all_files, parse_manifest, remove_tree
from echelon.ground.mirror import compare_sizes, publish
from echelon.ground.object_store import ObjectStore, ObjectStoreError
from echelon.ground.run_files import UNFINISHED
from echelon.ground.sizes import render_bytes
from echelon.recipe.document import Recipe

logger = logging.getLogger(__name__)

_KEPT = "prepared"
_KEY = re.compile(r"[0-9a-f]{16}")
_READERS = 8
_PATIENCE_SECONDS = 20.0
_WORTH_A_LINE_SECONDS = 10.0

_LATE_SECONDS = 600.0
_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 5, 20, 2


def find_large_disk(base: Path) -> tuple[Path, int]:
    """The folder for large files, on the disk with the most free space, and that space in bytes.

    The container's own disk is small, and the mount point of the instance's disk differs. The checkpoint folder is not
    used: SageMaker copies it to S3.
    """
    places = (base, Path(tempfile.gettempdir()))
    free = {folder: shutil.disk_usage(folder).free for folder in places if os.access(folder, os.W_OK)}
    largest = max(free, key=lambda folder: free[folder], default=base)
    return largest, free.get(largest, 0)


def open_kept(recipe: Recipe, base: Path) -> "DataKeeper":
    """Choose where a container prepares its data, and bring back there what earlier starts have prepared."""
    prepared = find_large_disk(base)[0] / "prepared"
    settle_times(recipe, base / "input" / "data")
    restore(base / "checkpoints", prepared)
    return DataKeeper(base / "checkpoints", prepared)


def settle_times(recipe: Recipe, data: Path) -> None:
    """Set the time of each file of the recipe's data to a number that follows from its content.

    Prepared data is found by the path, size and time of each file that it was made of. SageMaker copies the channels
    anew at each start, so their times say nothing. Left out: file systems and streamed channels, which are not copies.
    """
    if recipe.launch.sagemaker.input_mode == "FastFile":
        return
    mounted = {system.channel for system in recipe.launch.sagemaker.file_systems}
    channels = {
        path.relative_to(data).parts[0]
        for path in (Path(source.path) for source in (*recipe.data.train, *recipe.data.validation))
        if path.is_relative_to(data) and path != data
    }
    files = [path for name in sorted(channels - mounted) for path in (data / name).rglob("*") if path.is_file()]
    began = time.monotonic()
    with ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(_settle_time, files))
    if (seconds := time.monotonic() - began) > _WORTH_A_LINE_SECONDS:
        logger.info(f"container: read the data in {seconds:.0f} s, to know it again at a restart")


def _settle_time(path: Path) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").digest()
        moment = int.from_bytes(digest[:7], "big")
        os.utime(path, ns=(moment, moment))
    except OSError as error:  # the data is then prepared again, and what cannot be read is reported then
        logger.info(f"container: {path} keeps its time: {error.strerror}")


def restore(checkpoints: Path, place: Path) -> None:
    """Make the prepared data of earlier starts appear in `place`; remove what was copied from S3 incompletely."""
    kept = checkpoints / _KEPT
    store = ObjectStore(f"file://{kept}")
    place.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path for path in kept.glob("*") if path.is_dir()):
        link = place / folder.name
        if _is_complete(store, folder.name):
            if not link.exists():
                link.symlink_to(folder, target_is_directory=True)
                logger.info(f"container: data prepared by an earlier start is in {folder}")
        else:
            logger.info(f"container: {folder} is incomplete, so the data is prepared again")
            remove_tree(folder)


class DataKeeper:
    """Copies the prepared data to the checkpoint folder once it is complete, in a thread of its own."""

    def __init__(self, checkpoints: Path, place: Path) -> None:
        self.place = place
        self._kept = checkpoints / _KEPT
        self._thread: threading.Thread | None = None

    def keep(self, wait: bool) -> None:
        """Start copying if there is complete data that was not there at the start.

        With `wait`, also wait for the end of the copy, for as long as a container that must stop can.
        """
        if self._thread is None and (new := next(self._find_new(), None)) is not None:
            self._thread = threading.Thread(target=self._copy, args=(new,), name="prepared data", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def _find_new(self) -> Iterator[Path]:
        for path in sorted(self.place.glob("*")):
            is_whole = _KEY.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
            if is_whole and not (self._kept / path.name).exists():
                yield path

    def _copy(self, folder: Path) -> None:
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
            needed = sum(path.stat().st_size for path in list_all_files(folder).values())
            free = shutil.disk_usage(self._kept).free
            if 2 * needed > free:
                logger.warning(
                    f"container: the prepared data ({render_bytes(needed)}) is not kept for later starts: "
                    f"{self._kept} has {render_bytes(free)} free"
                )
                return
            publish(ObjectStore(f"file://{self._kept}"), folder)
        except (OSError, ObjectStoreError) as error:
            logger.warning(f"container: the prepared data is not kept for later starts: {error}")
            shutil.rmtree(self._kept / folder.name, ignore_errors=True)


def _is_complete(store: ObjectStore, name: str) -> bool:
    """Whether a kept folder has all its files with their sizes: S3 may hold a part of it."""
    try:
        content = store.read(f"{name}.json") if _KEY.fullmatch(name) else None
        return content is not None and not compare_sizes(parse_manifest(content)[1], store.sizes(name))
    except (ValueError, ObjectStoreError):
        return False


class CheckpointRemover:
    """Looks at the checkpoints of a run, `folder`, whose copy is at `address` in S3.

    Only checkpoints that it has seen in the folder are removed, and the unfinished folders of those that it has seen
    come or go. An error ends it with one line: the run goes on.
    """

    def __init__(self, folder: Path, address: str, region: str | None) -> None:
        self._folder, self._region = folder, region
        self._bucket, _, prefix = address.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        self._seen = self._list()
        self._due: dict[str, float] = {}
        self._s3: Any = None
        self._works = True

    def look(self) -> None:
        """Remove the copies of what has gone since the last look, and of what went shortly before.

        A file that SageMaker was copying meanwhile arrives later.
        """
        if not self._works:
            return
        for name in self._list_due():
            try:
                self._remove(f"{self._prefix}{name}/")
            except Exception as error:  # boto3 is missing, or AWS refuses: neither may end a run
                self._works = False
                logger.warning(
                    f"container: removed checkpoints stay in S3 below s3://{self._bucket}/{self._prefix}, and come "
                    f"back at a restart ({' '.join(str(error).split())}); the role of the job needs s3:ListBucket and "
                    "s3:DeleteObject there"
                )
                return

    def _list_due(self) -> list[str]:
        """The folders whose copies may be in S3, but which are not here."""
        now, clock = self._list(), time.monotonic()
        changed, self._seen = self._seen ^ now, now
        steps = {name.partition("-")[2] for name in changed}
        gone = changed | {f"{kind}-{step}" for kind in UNFINISHED for step in steps}
        due = {**self._due, **dict.fromkeys(gone, clock + _LATE_SECONDS)}
        self._due = {name: until for name, until in due.items() if until > clock and name not in now}
        return sorted(self._due)

    def _list(self) -> set[str]:
        kinds = ("step", *UNFINISHED)
        return {path.name for kind in kinds for path in self._folder.glob(f"{kind}-*") if path.is_dir()}

    def _remove(self, prefix: str) -> None:
        if self._s3 is None:
            import boto3
            from botocore.config import Config

            retries: Any = {"total_max_attempts": _ATTEMPTS, "mode": "standard"}
            settings = Config(connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS, retries=retries)
            self._s3 = boto3.Session(region_name=self._region).resource("s3", config=settings)
        for answer in self._s3.Bucket(self._bucket).objects.filter(Prefix=prefix).delete():
            if errors := answer.get("Errors"):
                raise PermissionError(f"{errors[0].get('Code')}: {errors[0].get('Message')}")
