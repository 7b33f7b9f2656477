"""A folder in this machine's memory, which outlives the workers of a job and not their parent."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLACE = Path("/dev/shm")


@contextmanager
def memory_held(is_wanted: bool) -> Iterator[Path | None]:
    """A new folder for the time of the block, which only this user may enter; None where none is wanted.

    A parent that is killed cannot remove it: its workers do (`start_watchdog`).
    """
    if not is_wanted:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="echelon-snapshots-", dir=PLACE))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
