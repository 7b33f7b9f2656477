"""Snapshots: checkpoints in the machine's memory, for processes that are started again there."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.checkpoint.folder import Checkpoint, find_checkpoints
from echelon.checkpoint.store import CheckpointStore
from echelon.errors import CheckpointError

logger = logging.getLogger(__name__)


class Snapshots:
    """Saves the state of a run into a folder in memory that the parent of its ranks owns, in place of the one before.

    It outlives the ranks and not their parent, so it covers the loss of processes, not of the machine. A snapshot is a
    checkpoint in every other way. Every method is collective. One that fails costs no training: after three in a row
    there are no more.
    """

    def __init__(self, folder: Path | None, every_steps: int | None) -> None:
        """`folder`: of the parent's; without one there are no snapshots."""
        self._every_steps = every_steps
        self._store: CheckpointStore | None = None
        if folder is not None and every_steps is not None:
            self._has_one = bool(find_checkpoints(folder))
            self._store = CheckpointStore(folder, keep_last=1, asynchronous=True)

    def rehearse(self, tensors: Mapping[str, Any]) -> None:
        """Whether there is memory for two, since one stays until the next is whole. Raises CheckpointError."""
        if self._store is not None:
            try:
                self._store.rehearse(tensors, copies=1 if self._has_one else 2)
            except CheckpointError as error:
                raise CheckpointError(
                    f"checkpoint.snapshot_every_steps={self._every_steps}: the memory of /dev/shm does not hold two "
                    f"snapshots, or cannot be used; leave this key out. {error}"
                ) from error

    def is_due(self, done: int) -> bool:
        """Whether one is due after this number of steps."""
        return self._store is not None and self._every_steps is not None and done % self._every_steps == 0

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Take one, in the background. See CheckpointStore.save."""
        assert self._store is not None
        try:
            self._store.save(step, tensors, state)
        except CheckpointError as error:
            logger.warning(f"No more snapshots are taken: {error}")
            self._store = None

    def newest(self) -> Checkpoint | None:
        """The newest whole one, the same on every rank."""
        return None if self._store is None else self._store.newest()

    def close(self) -> None:
        """Wait for the one under way."""
        if self._store is not None:
            try:
                self._store.close()
            except CheckpointError:
                self._store = None  # the run needs it no more
