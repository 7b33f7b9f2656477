"""What is to be started, and who can start it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from echelon.launch.outcome import Outcome


@dataclass(frozen=True)
class JobSpec:
    """`num_processes` copies of `argv`, told apart by RANK and the other variables of torchrun.

    `max_restarts`: how often all of them are started again because one has failed. `notice_seconds`: how long they may
    take to save when they are asked to stop; 0: they are ended at once. `memory`: a folder in memory where they may
    leave what the next ones go on from.
    """

    argv: tuple[str, ...]
    num_processes: int
    run_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    notice_seconds: float = 0.0
    memory: Path | None = None


class Launcher(Protocol):
    """Starts a JobSpec somewhere."""

    def render(self, job: JobSpec) -> str:
        """What `submit` would start, as text a person can read or run."""
        ...

    def submit(self, job: JobSpec) -> Outcome:
        """Start the job; a launcher on this machine waits for its end."""
        ...
