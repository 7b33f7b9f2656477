"""One run of a drill: `echelon train` in a separate process, observed from outside like by a user."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from echelon.ground.errors import EchelonError, TrainingError
from echelon.learn.checkpoint.fill import load_alone, read_metadata
from echelon.learn.checkpoint.folder import Checkpoint, list_checkpoints
from echelon.run.folder.run_folder import OWNER_ONLY, RunFolder

# Fields of a row that must equal those of the undisturbed run, bit for bit.
EXACT = ("step", "tokens", "loss", "grad_norm", "learning_rate", "batch_hash", "reward")
# Those that do not depend on the order of sums, or of updates.
_ORDERLESS = ("step", "tokens", "learning_rate", "batch_hash")
_STEPS = ("step", "learning_rate")
# By how much losses may differ if fewer ranks have added up gradients in some steps.
_ROUNDING = 1e-3

_LOOK_SECONDS = 0.03
_PATIENCE_SECONDS = 600.0
# Killed processes end well within this time.
_GONE_SECONDS = 10.0


class Likeness(StrEnum):
    """What of a run can be expected to equal the undisturbed one."""

    BITS = "every bit"
    """Rows, weights and optimizer state."""
    ROUNDING = "up to rounding"
    """What each step read, and losses within 0.1 %."""
    BATCHES = "the batches"
    """What each step read."""
    STEPS = "the steps"
    """That all steps were taken: answers without a reward are not trained on."""


class DrillInterrupted(EchelonError):
    """The drill was asked to stop; none of its processes is running."""


class Process(Protocol):
    """The part of a Popen that a drill uses; of several machines, all of their agents."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self) -> int:
        """The exit code, once it has ended."""

    def kill(self) -> None:
        """Kill it."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal."""


@dataclass(frozen=True)
class Trial:
    """A run of a drill: its folder, and the command that starts or resumes it.

    `asked` returns the signal that asked the drill to stop, or None.
    """

    run: RunFolder
    command: tuple[str, ...]
    num_steps: int
    asked: Callable[[], str | None] = lambda: None

    @property
    def log(self) -> Path:
        """The command's output."""
        return self.run.path.with_suffix(".log")

    @contextmanager
    def started(self) -> Iterator["RunningCommand"]:
        """Start the command; its remaining processes are killed at the end of the block."""
        self.log.parent.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = self.start(log)
        try:
            yield RunningCommand(process, self)
        finally:
            self.end(process)

    def start(self, log: IO[bytes]) -> Process:
        """Start the command, whose output goes to a log."""
        return subprocess.Popen(
            [sys.executable, "-m", "echelon", *self.command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    def end(self, process: Process) -> None:
        """Kill what remains."""
        assert isinstance(process, subprocess.Popen)
        # Ranks have their own sessions, and a suspended rank cannot detect that its agent is gone.
        ranks = _find_descendants(process.pid) if process.poll() is None else []
        process.kill()
        process.wait()
        _kill(ranks)

    def complete(self) -> None:
        """Run the command to its end. Raises TrainingError with its last line if it fails."""
        with self.started() as job:
            if (code := job.wait()) != 0:
                raise TrainingError(f"the drill's own run ended with exit code {code}: {self.last_words()}")

    def last_words(self) -> str:
        """The last line that the command printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "it printed nothing"

    def rows(self) -> list[dict[str, Any]]:
        """The training rows so far."""
        return [row for row in self.run.read_metrics().rows if row["kind"] == "train"]

    def events(self, since: float = 0.0) -> list[dict[str, Any]]:
        """The events since a time in UTC seconds."""
        return [event for event in self.run.rows.read_events() if event["time"] >= since]

    def equals(self, other: "Trial", likeness: Likeness) -> bool:
        """Whether both ended alike."""
        keys = {Likeness.BITS: EXACT, Likeness.STEPS: _STEPS}.get(likeness, _ORDERLESS)
        mine, theirs = ([[row.get(key) for key in keys] for row in trial.rows()] for trial in (self, other))
        if mine != theirs:
            return False
        if likeness is Likeness.BITS:
            return _are_equal(*(read_tensors(trial.newest_checkpoint()) for trial in (self, other)))
        losses = ((row["loss"] for row in trial.rows()) for trial in (self, other))
        return likeness is not Likeness.ROUNDING or all(
            math.isclose(left, right, rel_tol=_ROUNDING) for left, right in zip(*losses, strict=True)
        )

    def newest_checkpoint(self) -> Checkpoint:
        """The newest checkpoint. The run must have one."""
        return list_checkpoints(self.run.path)[-1]


@dataclass(frozen=True)
class RunningCommand:
    """A running command."""

    process: Process
    trial: Trial

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the end, and return its exit code; or for a condition, and return None.

        Raises TrainingError if neither comes, and Interrupted when the drill is asked to stop.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if (name := self.trial.asked()) is not None:
                raise DrillInterrupted(f"stopped by {name}; the drill's processes have ended")
            if until():
                return None
            if (code := self.process.poll()) is not None:
                return code
            time.sleep(_LOOK_SECONDS)
        raise TrainingError(
            f"the drill's run neither made progress nor ended in {_PATIENCE_SECONDS:.0f} s: {self.trial.last_words()}"
        )

    def wait_for_step(self, step: int) -> int:
        """Wait until a step has its row; returns the newest step. Raises TrainingError if the run ends before."""
        code = self.wait(lambda: self.trial.run.rows.last_step() >= step)
        if code is not None:
            raise TrainingError(f"the drill's run ended with exit code {code} too early: {self.trial.last_words()}")
        return self.trial.run.rows.last_step()

    def ranks(self) -> list[int]:
        """The process ids of the ranks that have started, by rank."""
        return [pid for _, pid in sorted(self.trial.run.read_pids().items())]


def read_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, on the CPU."""
    entries = read_metadata(checkpoint.path).state_dict_metadata
    tensors = {}
    for name, entry in entries.items():
        assert isinstance(entry, TensorStorageMetadata)
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_alone(checkpoint.path, tensors)
    return tensors


def find_living(pids: Sequence[int]) -> list[int]:
    """The processes that have not ended; zombies, which may stay forever in a container, do not count."""
    living = {pid for pid, _, state in _list_processes() if not state.startswith("Z")}
    return [pid for pid in pids if pid in living]


def find_children(pid: int, word: str) -> list[int]:
    """The children of a process with a word in their command line."""
    return [process for process, parent, command in _list_processes("args") if parent == pid and word in command]


def _list_processes(what: str = "stat") -> list[tuple[int, int, str]]:
    """Every process of this machine, with its parent and its state, or something else that ps knows."""
    command = ["ps", "-A", "-ww", "-o", f"pid=,ppid=,{what}="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        (int(pid), int(parent), text) for pid, parent, text in (line.split(None, 2) for line in listed.splitlines())
    ]


def _find_descendants(pid: int) -> list[int]:
    """All descendants of a running process."""
    processes = _list_processes()
    pids = [pid]
    for parent in pids:  # the list grows
        pids += [process for process, its_parent, _ in processes if its_parent == parent]
    return pids[1:]


def _kill(pids: Sequence[int]) -> None:
    """Kill processes, and wait until they have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_SECONDS
    while find_living(pids) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
