"""An in-memory folder for snapshots, which outlives the workers of a job but not their parent."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.ground.scratch import scratch_folder

PLACE = Path("/dev/shm")


@contextmanager
def memory_held(is_wanted: bool) -> Iterator[Path | None]:
    """Create a folder for the duration of the block, accessible only to this user; None if it is not wanted.

    If the parent is killed, its workers remove the folder (`start_watchdog`).
    """
    if not is_wanted:
        yield None
        return
    with scratch_folder("snapshots", PLACE) as folder:
        yield folder
