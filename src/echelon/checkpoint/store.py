"""Saving, verifying and loading checkpoints, on all ranks together.

A checkpoint is written into a hidden folder beside its final place. When every rank's file is complete, rank 0 adds
`state.json` and a manifest of sizes and checksums, flushes all of it to disk and renames the folder (`folder.py`).
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from echelon.checkpoint.carrier import Carrier
from echelon.checkpoint.filling import fill_tensors, find_reason
from echelon.checkpoint.folder import (
    Checkpoint,
    describe_newest,
    find_checkpoints,
    prune,
    publish,
)
from echelon.checkpoint.rehearsal import rehearse_save
from echelon.checkpoint.retries import MAX_FAILURES, Retries
from echelon.checkpoint.stager import Stager
from echelon.checkpoint.upload import Uploader
from echelon.errors import CheckpointError
from echelon.runs.checksums import describe_files, find_faults
from echelon.runs.run_folder import sweep_checkpoints

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Checking a checkpoint longer than this is worth a line.
_LONG_SECONDS = 10.0
# For how long a failed run awaits its last upload.
_ABANDONED_SECONDS = 3.0


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Where nobody listens."""


class CheckpointStore:
    """Saves a run's checkpoints in the background, one at a time, and keeps the newest few whole ones.

    Every method is collective. Saves run in a thread, over a gloo group of their own; the tensors are copied before
    `save` returns. The threads agree on how a save ended, so that every rank does the same about one that failed: it is
    tried again 10 steps later, then 100, and the third failure in a row is an error.

    `note` gets the events: `save` when one begins, `publish` when all ranks have written,
    `checkpoint` when it has its name, `save_failed`. `uploads` is offered every checkpoint. Both on rank 0 alone,
    also from the thread. `carry` makes what carries files where machines do not share `folder`: then rank 0's has them.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        asynchronous: bool,
        note: Callable[..., None] = _ignore,
        uploads: Uploader | None = None,
        carry: Callable[[dist.ProcessGroup], Carrier] | None = None,
    ) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._note = note
        self._uploads = uploads
        self._group = dist.new_group(backend="gloo")
        self._control = dist.new_group(backend="gloo")
        self._carrier = None if carry is None else carry(self._group)
        self._stager = Stager()
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None
        self._retries = Retries()
        self._damaged: set[int] = set()
        # How long the newest save that this rank knows of took until it was published.
        self.write_seconds: float | None = None
        if self._is_publisher:
            folder.mkdir(parents=True, exist_ok=True)
            sweep_checkpoints(folder)
        dist.barrier(self._group)

    def rehearse(self, tensors: Mapping[str, Any], copies: int = 1) -> None:
        """Try out a save of these tensors with a few bytes, and see whether there is room for `copies`; leaves nothing.

        Raises:
            CheckpointError: the same on every rank, with the bytes needed and free where they are the reason.
        """
        # A DTensor counts whole.
        sizes = {name: copies * tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        is_here = self._carrier is None or self._carrier.is_here
        rehearse_save(self._folder, sizes, self._group, is_here)

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int | None = None) -> None:
        """Save one checkpoint, and remove what is beyond the newest few.

        Args:
            tensors: name to tensor or DTensor; nothing else.
            state: JSON values, the same on every rank.
            keep: a step whose checkpoint stays besides.

        Raises:
            CheckpointError: this save, or the one before it, was the third in a row to fail.
        """
        self.wait()
        if self._carrier is None and not self._folder.is_dir():  # DCP would make it again
            raise self._save_error(f"{self._folder} is gone")
        began = time.monotonic()
        self._retries.begin(step)
        self._tell("save", step)
        checkpoint = Checkpoint(step, self._folder / f"step-{step:08d}")
        writing = self._folder / f".writing-{step:08d}"
        mine = writing if self._carrier is None else self._carrier.writing(writing)
        writer = FileSystemWriter(mine, single_file_per_rank=True, sync_files=True)
        try:
            written = async_save(
                dict(tensors), storage_writer=writer, async_stager=self._stager, process_group=self._group
            )
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            raise self._save_error(find_reason(error)) from error
        logger.debug(f"checkpoint: step {step} is copied after {time.monotonic() - began:.2f} s; writing")
        assert isinstance(written, Future)
        self._pending = self._publisher.submit(self._finish, began, written, writing, checkpoint, dict(state), keep)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> bool:
        """Wait until the save under way, if any, is published; False when the newest one failed and is to be repeated.

        Raises:
            CheckpointError: it was the third in a row to fail.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            reason = pending.result()
            self._retries.end(failed=reason is not None)
            if self._retries.is_exhausted:
                raise self._save_error(f"{reason}; it was the third failure in a row")
        return not self._retries.is_needed

    def agree_on_retry(self, step: int) -> bool:
        """Find out together whether a save failed and is to be repeated after this step. To be called after every step.

        Ranks see a save end at different moments. So 1, 2, 4, 8... steps after one began, and at no other step, they
        ask each other whether it has ended everywhere: an all-reduce of one number between the hosts.
        """
        if self._pending is not None and self._retries.take_look(step):
            ended = torch.tensor(int(self._pending.done()))
            dist.all_reduce(ended, dist.ReduceOp.MIN, group=self._control)
            if ended.item():
                self.wait()
        return self._retries.is_due(step)

    def close(self, time_left: Callable[[], float] = lambda: math.inf) -> None:
        """Wait, for the last upload too, and release the thread; no rank leaves while rank 0 is at the upload.

        `time_left` is asked again and again: the upload is awaited until it is 0 on some rank.
        """
        self.wait()
        self._publisher.shutdown()
        is_over = torch.tensor(0)
        while not is_over:
            is_over.fill_(time_left() <= 0 or (self._is_publisher and self._await_uploads(time_left())))
            dist.all_reduce(is_over, dist.ReduceOp.MAX, group=self._control)
        if self._uploads is not None:
            self._uploads.tell_unfinished()

    def abandon(self) -> None:
        """After a failure, on each rank by itself: give the upload under way a moment, and say what is left of it."""
        if self._uploads is not None:
            self._uploads.wait(_ABANDONED_SECONDS)
            self._uploads.tell_unfinished()

    def upload_newest(self, step: int, keep: int | None) -> None:
        """On rank 0: have the checkpoint that a start goes on from uploaded, unless the object store holds it."""
        if self._uploads is not None and step:
            self._uploads.offer(Checkpoint(step, self._folder / f"step-{step:08d}"), keep, if_missing=True)

    def _await_uploads(self, seconds: float) -> bool:
        return self._uploads is None or self._uploads.wait(min(seconds, 1.0))

    def newest(self, beyond: int = -1) -> Checkpoint | None:
        """The newest whole checkpoint, the same one on every rank; damaged ones are passed over, each with a line.

        None where none is of a step above `beyond`.

        Every byte of it is read and compared with its checksum, which costs what reading it from the disk costs, or
        hashing it: each rank takes a share of the files, as many as it wrote itself under the same plan.
        """
        found = [find_checkpoints(self._folder) if self._is_publisher else []]
        dist.broadcast_object_list(found, src=0, group=self._group)
        for checkpoint in reversed([each for each in found[0] if each.step > beyond]):
            began = time.monotonic()
            shares = self._gather(self._find_faults(checkpoint))
            faults = list(dict.fromkeys(fault for share in shares for fault in share))
            seconds = time.monotonic() - began
            if seconds > _LONG_SECONDS and self._is_publisher:
                logger.info(f"Comparing {checkpoint.path.name} with its checksums took {seconds:.0f} s.")
            if not faults:
                return checkpoint if self._carrier is None else self._carrier.bring(checkpoint)
            self._damaged.add(checkpoint.step)
            if self._is_publisher:
                logger.warning(f"Passing over a damaged checkpoint: {checkpoint.path}: {'; '.join(faults)}.")
        return None

    def _find_faults(self, checkpoint: Checkpoint) -> list[str]:
        """Of this rank's share of the files; where only rank 0 is known to see them, it takes all."""
        if self._carrier is None:
            return find_faults(checkpoint.path, True, dist.get_rank(), dist.get_world_size())
        return find_faults(checkpoint.path, True) if self._is_publisher else []

    def load(self, checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> None:
        """Fill `tensors` in place, whatever plan wrote the checkpoint.

        Raises:
            CheckpointError: the checkpoint is hostile, lacks a tensor, or holds another shape.
        """
        fill_tensors(checkpoint.path, tensors, process_group=self._group)
        if self._carrier is not None:
            self._carrier.clear()

    @property
    def _is_publisher(self) -> bool:
        return dist.get_rank() == 0

    def _finish(
        self,
        began: float,
        written: "Future[Any]",
        writing: Path,
        checkpoint: Checkpoint,
        state: dict[str, Any],
        keep: int | None,
    ) -> str | None:
        """In the thread: publish what all ranks have written. Why not, or None; the same on every rank."""
        mine = self._describe_written(written, writing)
        logger.debug(f"checkpoint: step {checkpoint.step} is written here after {time.monotonic() - began:.2f} s")
        reports = self._gather(mine)
        reason = next((each for each, _ in reports if each is not None), None)
        if self._carrier is not None:
            reason = self._carrier.collect(writing) if reason is None else self._carrier.discard(writing, reason)
        if self._is_publisher:
            if reason is None:
                described = {name: entry for _, each in reports for name, entry in each.items()}
                reason = self._publish(writing, checkpoint, state, described)
            if reason is None:
                self._conclude(checkpoint, keep, time.monotonic() - began)
            else:
                self._give_up(checkpoint, reason)
        reason = self._gather(reason)[0]
        if reason is None:
            self.write_seconds = time.monotonic() - began
        return reason

    def _describe_written(self, written: "Future[Any]", writing: Path) -> tuple[str | None, dict[str, Any]]:
        """Why this rank could not write, or None; sizes and checksums of its files.

        Each rank reads what it wrote: one for all would take as many times longer as there are ranks.
        """
        try:
            written.result()
            mine = writing if self._carrier is None else self._carrier.writing(writing)
            return None, describe_files(mine.glob(f"__{dist.get_rank()}_*"))
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            return find_reason(error), {}

    def _publish(
        self, writing: Path, checkpoint: Checkpoint, state: dict[str, Any], described: dict[str, Any]
    ) -> str | None:
        """On rank 0: give the checkpoint its name. Why it could not, or None."""
        self._tell("publish", checkpoint.step)
        try:
            publish(writing, checkpoint.path, state, described)
        except Exception as error:
            return find_reason(error)
        return None

    def _gather(self, value: T) -> list[T]:
        """What each rank brings, by rank."""
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _conclude(self, checkpoint: Checkpoint, keep: int | None, seconds: float) -> None:
        """After a save: the event, and room for the next one."""
        self._damaged.discard(checkpoint.step)
        uploading = () if self._uploads is None else self._uploads.offer(checkpoint, keep)
        self._tell("checkpoint", checkpoint.step, seconds=seconds)
        try:
            prune(self._folder, self._keep_last, (keep, *uploading), self._damaged)
        except OSError as error:
            logger.warning(f"{checkpoint.path.name} is saved, but an older checkpoint could not be removed: {error}.")

    def _give_up(self, checkpoint: Checkpoint, reason: str) -> None:
        """After a save that failed: no trace of it but a line and an event."""
        sweep_checkpoints(self._folder)
        count = self._retries.num_failures + 1
        plan = "" if count == MAX_FAILURES else "; it is tried again"
        name = checkpoint.path.name
        logger.warning(
            f"The checkpoint {name} could not be written: {reason} (failure {count} of {MAX_FAILURES}{plan})."
        )
        self._tell("save_failed", checkpoint.step, reason=reason)

    def _tell(self, event: str, step: int, **fields: Any) -> None:
        if self._is_publisher:
            with suppress(OSError):  # a full disk takes no event
                self._note(event, step=step, **fields)

    def _save_error(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint step-{self._retries.began_at:08d} could not be written: {reason}. Earlier checkpoints in "
            f"{self._folder} are untouched, the last good one is {describe_newest(self._folder)}; make room or choose "
            "another run.dir, and start the same command again."
        )
