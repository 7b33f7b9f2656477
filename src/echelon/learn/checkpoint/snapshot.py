"""Snapshots: checkpoints in the machine's memory, for workers that are restarted on the same machine."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.ground.errors import CheckpointError
from echelon.learn.checkpoint.folder import Checkpoint, find_checkpoints
from echelon.learn.checkpoint.store import CheckpointStore

logger = logging.getLogger(__name__)


class Snapshots:
    """Saves the run's state to a folder in memory that the parent process owns; each snapshot replaces the last.

    The folder outlives the ranks but not their parent, so it covers the loss of workers, not of the machine. Otherwise
    a snapshot is a checkpoint. Every method is collective. A failed snapshot does not stop training: after three
    consecutive failures no more are taken.
    """

    is_beside = False
    """Whether one is taken after a step with a checkpoint too."""

    def __init__(
        self, folder: Path | None, every_steps: int | None, new_group: Callable[[], dist.ProcessGroup] | None = None
    ) -> None:
        """`folder`: created by the parent process; None disables snapshots. `new_group`: see CheckpointStore."""
        self._every_steps = every_steps
        self._store: CheckpointStore | None = None
        if folder is not None and every_steps is not None:
            self._has_one = bool(find_checkpoints(folder))
            self._store = CheckpointStore(folder, keep_last=1, asynchronous=True, new_group=new_group)

    def rehearse(self, tensors: Mapping[str, Any]) -> None:
        """Check that memory is enough for two, since one stays until the next is complete. Raises CheckpointError."""
        if self._store is not None:
            try:
                self._store.rehearse(tensors, copies=1 if self._has_one else 2)
            except CheckpointError as error:
                raise CheckpointError(
                    f"checkpoint.snapshot_every_steps={self._every_steps}: /dev/shm is unusable or too small for two "
                    f"snapshots; remove this key. {error}"
                ) from error

    def is_due(self, done: int) -> bool:
        """Whether a snapshot is due after this number of steps."""
        return self._store is not None and self._every_steps is not None and done % self._every_steps == 0

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Take a snapshot in the background. See CheckpointStore.save."""
        assert self._store is not None
        try:
            self._store.save(step, tensors, state)
        except CheckpointError as error:
            logger.warning(f"No further snapshots will be taken: {error}")
            self._store = None

    def newest(self) -> Checkpoint | None:
        """Return the newest intact snapshot, the same on every rank."""
        return None if self._store is None else self._store.newest()

    def drop(self) -> None:
        """After the process group has ended: see CheckpointStore.drop. Not collective."""
        if self._store is not None:
            self._store.drop()

    def close(self) -> None:
        """Wait for the pending snapshot."""
        if self._store is not None:
            try:
                self._store.close()
            except CheckpointError:
                self._store = None  # the run no longer needs it
