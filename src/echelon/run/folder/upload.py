"""Uploads a run's checkpoints to an object store in a thread of rank 0, so that no server slows or stops training.

One checkpoint is uploaded at a time, and only the newest one saved meanwhile waits; others are skipped, and logged.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from echelon.ground.errors import CheckpointError, EchelonError
from echelon.ground.object_store import ObjectStore, describe_failure
from echelon.ground.stored import read_text
from echelon.learn.checkpoint.folder import Checkpoint
from echelon.run.folder.remote import Owner, RemoteRuns, read_run_name, write_bundle
from echelon.run.folder.run_folder import RunFolder

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0
"""How long the end of a run waits for an upload that keeps failing."""

_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 60.0
# Number of failed attempts after which a newer checkpoint replaces the current one.
_ATTEMPTS = 3
# Longest delay between attempts while the run waits for its last upload.
_DELAY_AT_END_SECONDS = 2.0


@dataclass(frozen=True)
class QueuedUpload:
    """A checkpoint to upload; with `if_missing` only if the store does not have it yet.

    `keep` is a step whose checkpoint is kept in addition to the newest few.
    """

    checkpoint: Checkpoint
    keep: int | None
    if_missing: bool
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def folder(self) -> str:
        """The folder it is uploaded to, unique to this upload."""
        return f"step-{self.checkpoint.step:08d}-{self.mark}"


class Uploader:
    """Uploads the checkpoints it is offered, and keeps the newest few in the store. Failures are logged and recorded.

    `note` receives the events `upload`, `upload_failed`, `upload_left_out` and `upload_unfinished`, also from the
    thread.
    """

    def __init__(self, url: str, folder: RunFolder, keep_last: int, note: Callable[..., None]) -> None:
        """Import the store's packages, in the main thread. The first request is made by the first upload."""
        self._remote = RemoteRuns(ObjectStore(url))
        self._folder = folder
        self._keep_last = keep_last
        self._note = note
        self._writer = uuid.uuid4().hex
        self._has_claimed = False
        self._changed = threading.Condition()
        self._current: QueuedUpload | None = None
        self._waiting: QueuedUpload | None = None
        self._joint: QueuedUpload | None = None  # what all ranks upload
        self._sweeping = threading.Lock()
        self._closing_since: float | None = None
        self._failing_since: float | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def offer(self, checkpoint: Checkpoint, keep: int | None = None, if_missing: bool = False) -> Collection[int]:
        """Schedule the upload of a published checkpoint, in place of one that waits. Returns immediately.

        A checkpoint that was just saved is always sent, since the store's copy of that step may be damaged. With
        `if_missing`, it is sent only if the store has no checkpoint with the same manifest.

        Returns the steps whose checkpoints must stay in the run folder until the next call.
        """
        self._remote.spared = ""  # what all ranks have uploaded has a marker, or this takes its place
        with self._changed:
            if self._given_up:
                return ()
            left_out, self._waiting = self._waiting, QueuedUpload(checkpoint, keep, if_missing)
            self._changed.notify_all()
            held = {job.checkpoint.step for job in (self._current, self._waiting) if job is not None}
        if left_out is not None:
            self._leave_out(left_out)
        return held

    def begin(self, written: Checkpoint) -> str | None:
        """See `Uploads`. Called in the thread of a save."""
        if self._given_up or self.is_failing:
            return None
        self._joint = QueuedUpload(written, None, if_missing=False)
        with self._sweeping:
            self._remote.spared = self._joint.folder
        with suppress(Exception):  # rank 0's machine collects the files then, and their upload reports what fails
            self._claim()
            return None if self._given_up else f"{self._run}/{self._joint.folder}"
        return None

    def finish(self, sent: Collection[str]) -> bool:
        """See `Uploads`. Called in the thread of a save."""
        assert self._joint is not None
        return self._publish(self._joint, sent)

    def is_done(self) -> bool:
        """Whether no upload is left, or the uploader has given up."""
        is_idle = self._current is None and self._waiting is None
        return self._given_up or is_idle or not self._thread.is_alive()

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failing_since is not None

    def wait(self, seconds: float) -> bool:
        """Wait at most this long for the remaining uploads; return whether waiting is over.

        It is over if they are done, or have failed for PATIENCE_SECONDS. Nothing may be offered after the first call.
        """
        with self._changed:
            self._closing_since = self._closing_since or time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(self.is_done, seconds)
            if self.is_done() or self._failing_since is None:
                return self.is_done()
            return time.monotonic() - max(self._closing_since, self._failing_since) > PATIENCE_SECONDS

    def tell_unfinished(self) -> None:
        """Log and record the checkpoint that is not uploaded before this process ends, if there is one."""
        with self._changed:
            job = None if self._given_up else self._waiting or self._current
        if job is not None:
            self._tell(
                f"checkpoint: {job.checkpoint.path.name} is saved in {self._folder.path}, but not yet in "
                f"{self._remote.url}; run the same command again to upload it"
            )
            self._record("upload_unfinished", job)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            failures = 0
            while not self._attempt(job) and not self._given_up:
                if self._is_superseded(failures):
                    self._leave_out(job)
                    break
                failures += 1

    def _next(self) -> QueuedUpload | None:
        with self._changed:
            self._current = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting is not None or self._closing_since is not None)
            self._current, self._waiting = self._waiting, None
            return None if self._given_up else self._current

    def _is_superseded(self, failures: int) -> bool:
        """Wait before the next attempt; return whether a newer checkpoint replaces one that keeps failing.

        The first few failures do not count, because files that were uploaded are not sent again.
        """
        with self._changed:
            closing_since = self._closing_since
            gives_way = failures + 1 >= _ATTEMPTS or closing_since is not None
            delay = min(_FIRST_DELAY_SECONDS * 2**failures, _MAX_DELAY_SECONDS)
            if closing_since is not None:
                delay = min(delay, _DELAY_AT_END_SECONDS)
            self._changed.wait_for(
                lambda: (gives_way and self._waiting is not None) or self._closing_since != closing_since, delay
            )
            return gives_way and self._waiting is not None

    def _attempt(self, job: QueuedUpload) -> bool:
        """Upload one checkpoint, and remove old ones; return whether that succeeded."""
        # Client libraries and servers may fail in any way, and must not end a training run.
        try:
            self._claim()
            self._upload(job)
            if job.keep is not None:
                self._upload_kept(job.keep)
        except Exception as error:
            self._note_failure(job, error)
            return False
        if self._failing_since is not None:
            self._tell(f"checkpoint: uploads to {self._remote.url} work again")
            with self._changed:
                self._failing_since = None
        return True

    def _claim(self) -> None:
        """Become the only writer of this run, and remove incomplete uploads of an earlier one."""
        if self._has_claimed:
            return
        owner = self._remote.read_owner()
        if owner is not None and owner.run != self._run:
            self._give_up(f"{self._remote.url} now belongs to another run")
            return
        self._remote.claim(Owner(self._run, read_text(self._folder.recipe_path), self._writer))
        with self._sweeping:
            self._remote.sweep(self._run)
        self._has_claimed = True

    def _upload(self, job: QueuedUpload) -> None:
        if self._given_up:
            return
        if self._is_there(job) or self._publish(job):
            with self._sweeping:
                self._remote.prune(self._run, job.checkpoint.step, self._keep_last, job.keep)

    def _publish(self, job: QueuedUpload, sent: Collection[str] = ()) -> bool:
        """Send what was not sent before, and write the marker; return whether this process may still do that."""
        step, began = job.checkpoint.step, time.monotonic()
        bundle = self._folder.path / f".run.zip.{self._writer}.{job.mark}.tmp"
        try:
            write_bundle(self._folder, step, bundle)
            num_bytes = self._remote.publish(self._run, job.checkpoint, job.folder, bundle, self._is_writer, sent)
        finally:
            bundle.unlink(missing_ok=True)
        if num_bytes == 0:
            self._give_up(f"another process has resumed this run and writes to {self._remote.url}")
            return False
        self._record("upload", job, seconds=time.monotonic() - began, bytes=num_bytes)
        return True

    def _upload_kept(self, step: int) -> None:
        """Upload the best checkpoint if it was skipped when it was saved."""
        checkpoint = Checkpoint(step, self._folder.checkpoints_dir / f"step-{step:08d}")
        if not self._given_up and checkpoint.path.is_dir():
            self._upload(QueuedUpload(checkpoint, step, if_missing=True))

    def _is_there(self, job: QueuedUpload) -> bool:
        """Whether an earlier attempt published it, or, with `if_missing`, the store already has it."""
        copies = [checkpoint for checkpoint in self._remote.find(self._run) if checkpoint.step == job.checkpoint.step]
        return any(
            checkpoint.folder == job.folder or (job.if_missing and checkpoint.holds(job.checkpoint))
            for checkpoint in copies
        )

    @property
    def _run(self) -> str:
        if (run := read_run_name(self._folder)) is None:
            raise CheckpointError(f"{self._folder.remote_path} is missing; start the same command again to write it")
        return run

    def _is_writer(self) -> bool:
        owner = self._remote.read_owner()
        return owner is None or owner.writer == self._writer

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self._tell(f"checkpoint: {reason}; this process stops uploading, and training continues")
        with suppress(OSError):
            self._note("upload_failed", reason=reason)

    def _note_failure(self, job: QueuedUpload, error: Exception) -> None:
        """Report a failure, unless uploads were already failing."""
        if self._failing_since is not None:
            return
        with self._changed:
            self._failing_since = time.monotonic()
        reason = str(error) if isinstance(error, EchelonError) else describe_failure(error)
        self._tell(
            f"checkpoint: {job.checkpoint.path.name} could not be uploaded to {self._remote.url} ({reason}); the "
            "upload will be retried, and training continues"
        )
        self._record("upload_failed", job, reason=reason)

    def _leave_out(self, job: QueuedUpload) -> None:
        if self._failing_since is None:  # the failure is already reported
            name = job.checkpoint.path.name
            self._tell(f"checkpoint: {name} is not uploaded: a newer one was saved before its upload started")
        self._record("upload_left_out", job)

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # a closed terminal must not end the upload
            logger.info(line)

    def _record(self, event: str, job: QueuedUpload, **fields: object) -> None:
        with suppress(OSError):  # the disk may be full
            self._note(event, step=job.checkpoint.step, **fields)
