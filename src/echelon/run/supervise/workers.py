"""The worker processes that an agent starts on its machine, and the folder in memory for their snapshots."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from echelon.ground.scratch import scratch_folder
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import Outcome


@dataclass(frozen=True)
class Workers:
    """`num_processes` copies of `argv` on this machine, which differ in RANK and the other variables of torchrun.

    `max_restarts`: how often all of them are restarted after a failure. `notice_seconds`: how long they may take to
    save when they are asked to stop; 0: they are ended immediately. `memory`: an in-memory folder for snapshots, from
    which restarted workers resume. `min_replicas`: the workers are replicas, of which at least so many train, and the
    others go on without a lost one; None: they are ranks that need each other. `replica_size`: so many workers are one
    replica. `num_essential`: the first so many replicas are parameter servers, which the others need. `needs_all`: the
    others go on only with a new one in the place of a lost one, also to save and stop. Of a quorum on
    several machines: `num_machines`, and `prepare`, by which the first one prepares the run; it returns how the job
    ends, or None if it can start.
    """

    argv: tuple[str, ...]
    num_processes: int
    folder: RunFolder
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    notice_seconds: float = 0.0
    memory: Path | None = None
    min_replicas: int | None = None
    replica_size: int = 1
    num_essential: int = 0
    needs_all: bool = False
    num_machines: int = 1
    prepare: Callable[[], Outcome | None] | None = None

    @property
    def world_size(self) -> int:
        """The processes of all machines."""
        return self.num_processes * self.num_machines

    def least_machines(self, usual: int) -> int:
        """How many machines are enough to go on. `usual`: for ranks that need each other."""
        if self.min_replicas is None or self.needs_all:
            return usual
        return -(-self.min_replicas * self.replica_size // self.num_processes)


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
