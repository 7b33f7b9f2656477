"""Saves, verifies and loads checkpoints, on all ranks together.

A checkpoint is written to a hidden folder next to its final path. When every rank's file is complete, rank 0 adds
`state.json` and a manifest of sizes and checksums, flushes everything to disk and renames the folder (`folder.py`).
"""

import logging
import math
import os
import shutil
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from typing_extensions import override

from echelon.ground.checksums import ELSEWHERE, Files, describe_files, find_faults, list_files, write_manifest
from echelon.ground.errors import CheckpointError
from echelon.ground.run_files import sweep_checkpoints
from echelon.ground.stored import sync_path, write_json
from echelon.learn.checkpoint.fill import fill_tensors, find_reason
from echelon.learn.checkpoint.folder import (
    STATE,
    Checkpoint,
    complete,
    describe_newest,
    find_checkpoints,
    prune,
    publish,
)
from echelon.learn.distributed.objects import broadcast_object, gather_objects
from echelon.learn.model.sharding import local_part

if TYPE_CHECKING:
    from echelon.learn.checkpoint.carrier import Carrier, Uploads

logger = logging.getLogger(__name__)


def find_owned(tensors: Mapping[str, Any], group: dist.ProcessGroup) -> frozenset[str]:
    """Return the names of the tensors that this rank copies and writes: its own, and its share of replicated ones.

    Collective over `group`. Ranks that hold the same part of a tensor share the work: all of them under DDP, those of
    the replicate axis under HSDP. DCP's planner, which also decides who writes, gives each part to the rank with the
    fewest bytes so far. So a save of only these tensors writes the same files as a save of all. The plan depends on
    names, shapes and dtypes only.

    Args:
        tensors: name to tensor or DTensor, as they will be saved; ranks may hold different names.
    """
    is_planner = dist.get_rank(group) == 0
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=is_planner)
    plans: list[SavePlan] | None = [SavePlan([])] * dist.get_world_size(group) if is_planner else None
    dist.gather_object(planner.create_local_plan(), plans, group=group, group_dst=0)
    shares = None
    if plans is not None:
        divided, _ = planner.create_global_plan(plans)
        shares = [frozenset(item.index.fqn for item in plan.items) for plan in divided]
    mine: list[frozenset[str]] = [frozenset()]
    dist.scatter_object_list(mine, shares, group=group, group_src=0)
    return mine[0]


# In addition to the tensors: the checkpoint's index, headers and alignment, and other writes to the disk meanwhile.
MARGIN_FRACTION = 0.05
MARGIN_BYTES_PER_TENSOR = 4096

_PROBE_BYTES = 4096


def rehearse_save(folder: Path, sizes: Mapping[str, int], group: dist.ProcessGroup, is_here: bool = True) -> None:
    """Perform the steps of a save with a small file per rank, and compare the free space with a checkpoint's size.

    Collective over `group`. Each rank writes and flushes a file in one hidden folder; rank 0 renames and removes the
    folder. Free space is that available to this user. A quota that the file system does not report is noticed only if
    it is exhausted.

    Args:
        sizes: the size in bytes of each full tensor of which this rank holds at least a part, by name. A checkpoint
            stores a name once, even if several ranks have it.
        is_here: whether this rank's machine has the checkpoint folder.

    Raises:
        CheckpointError: the same on every rank; no files are left behind.
    """
    writing, final = folder / ".writing-probe", folder / ".removing-probe"
    is_publisher = dist.get_rank(group) == 0
    everyone: list[Mapping[str, int]] | None = [{}] * dist.get_world_size(group) if is_publisher else None
    dist.gather_object(sizes, everyone, group=group, group_dst=0)

    def write() -> None:
        if not is_here:
            return
        writing.mkdir(exist_ok=True)
        with (writing / f"rank-{dist.get_rank(group)}").open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def publish() -> None:
        if is_publisher:
            sync_path(writing)
            writing.rename(final)
            sync_path(folder)
            _check_space(folder, dict(ChainMap(*map(dict, everyone or []))))

    try:
        for action in (write, publish):
            for rank, reason in enumerate(gather_objects(_attempt(action), group)):
                if reason is not None:
                    raise CheckpointError(
                        f"A checkpoint could not be saved to {folder}: rank {rank}: {reason}. Training has not "
                        "started; free space or choose another run.dir, and run the same command again."
                    )
    finally:
        if is_publisher:
            for probe in (writing, final):
                shutil.rmtree(probe, ignore_errors=True)
        dist.barrier(group)  # no rank may start another rehearsal in a folder that is being removed


def _attempt(action: Callable[[], None]) -> str | None:
    """Return why the action failed, to be shared with all ranks; None if it succeeded."""
    try:
        action()
    except (OSError, CheckpointError) as error:
        return str(getattr(error, "strerror", None) or error)
    return None


def _check_space(folder: Path, sizes: Mapping[str, int]) -> None:
    num_bytes, free = sum(sizes.values()), shutil.disk_usage(folder).free
    needed = round(num_bytes * (1 + MARGIN_FRACTION)) + len(sizes) * MARGIN_BYTES_PER_TENSOR
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs about {num_bytes:,} bytes ({needed:,} with a margin), and {free:,} are free on this "
            "disk"
        )


MAX_FAILURES = 3


class Retries:
    """Counts consecutive failed saves of one store: the first retry is 10 steps after the save began, the second 100.

    No communication: every rank records the same results, and so gets the same answers.
    """

    def __init__(self) -> None:
        self.began_at = 0
        """Step of the newest save."""
        self.num_failures = 0
        self._look_at = 0
        self._retry_at: int | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the newest save that has ended failed."""
        return self._retry_at is not None

    def is_due(self, step: int) -> bool:
        """Whether a failed save must be retried after this step."""
        return self._retry_at is not None and step >= self._retry_at

    def begin(self, step: int) -> None:
        """Record the start of a save."""
        self.began_at, self._look_at, self._retry_at = step, step + 1, None

    def end(self, failed: bool) -> None:
        """Record the result of a save."""
        self.num_failures = self.num_failures + 1 if failed else 0
        if failed:
            self._retry_at = self.began_at + 10**self.num_failures

    def take_look(self, step: int) -> bool:
        """Whether to check after this step if the pending save has ended: 1, 2, 4, 8... steps after it began."""
        if step < self._look_at:
            return False
        self._look_at = step + (step - self.began_at)
        return True


_COPIERS = 4


class Stager(BlockingAsyncStager):
    """Copies the tensors of a save into the buffers of the previous save, which `save` waits for.

    New buffers would take several times as long as the copy, because every page must first be allocated and cleared.
    Without a GPU a few threads copy, since a single thread does not reach the memory bandwidth. With a GPU the buffers
    are pinned, the fastest target for its copies. Pinning takes seconds for every ten gigabytes, so `prepare` does it
    in a thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._allocated: Future[dict[str, torch.Tensor]] | None = None

    def prepare(self, tensors: Mapping[str, Any]) -> None:
        """With a GPU, begin to allocate the buffers for these tensors; the first `stage` of the same ones uses them."""
        if torch.cuda.is_available():
            self._shapes = _describe(tensors)
            allocator = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
            self._allocated = allocator.submit(allocate_buffers, tensors, pinned=True)
            allocator.shutdown(wait=False)

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        allocated, self._allocated = self._allocated, None
        if allocated is not None:
            self._buffers = allocated.result()
        has_gpu, shapes = torch.cuda.is_available(), _describe(state_dict)
        if shapes != self._shapes or not self._buffers:
            self._shapes, self._buffers = shapes, allocate_buffers(state_dict, has_gpu)

        def copy(name: str) -> None:
            local_part(self._buffers[name]).copy_(local_part(state_dict[name].detach()), non_blocking=has_gpu)

        if has_gpu:
            for name in state_dict:
                copy(name)
            torch.cuda.synchronize()
        else:
            with ThreadPoolExecutor(_COPIERS) as copiers:
                list(copiers.map(copy, state_dict))
        return dict(self._buffers)


def allocate_buffers(tensors: Mapping[str, torch.Tensor], pinned: bool) -> dict[str, torch.Tensor]:
    """Tensors and DTensors like these in host memory, without copying what these contain."""
    buffers = {}
    for name, tensor in tensors.items():
        buffers[name] = torch.empty(local_part(tensor.detach()).shape, dtype=tensor.dtype, pin_memory=pinned)
        if isinstance(tensor, DTensor):
            whole: Any = tensor.detach().to("meta")
            whole._local_tensor = buffers[name]
            buffers[name] = whole
    return buffers


def _describe(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}


# A verification that takes longer than this is logged.
_LONG_SECONDS = 10.0
# How long a failed run waits for its last upload.
_ABANDONED_SECONDS = 3.0


class CheckpointStore:
    """Saves a run's checkpoints in the background, one at a time, and keeps the newest few intact ones.

    Every method is collective, except `abandon` and `upload_newest`. Saves run in a thread, over a separate gloo group;
    the tensors are copied before `save` returns. The threads agree on the result of a save, so that every rank handles
    a failure in the same way: it is retried 10 steps later, then 100, and the third consecutive failure is an error.

    `note` receives the events `save` when a save begins, `publish` when all ranks have written, `checkpoint` when it is
    published, and `save_failed`. `uploads` is offered every checkpoint. Both are used on rank 0 only, also from the
    thread. `carry` creates the Carrier if machines do not share `folder`; its store or rank 0's machine has them then.
    `new_group` forms a process group of all ranks over gloo; by default torch's function does.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        asynchronous: bool,
        note: Callable[..., None] = lambda *_, **__: None,
        uploads: "Uploads | None" = None,
        carry: "Callable[[dist.ProcessGroup], Carrier] | None" = None,
        new_group: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self.asynchronous = asynchronous
        """Whether `save` returns before the checkpoint is written."""
        self._note = note
        self._uploads = uploads
        form = new_group or partial(dist.new_group, backend="gloo", group_desc="checkpoints")
        self._group, self._control = form(), form()
        self._rank = dist.get_rank(self._group)
        self._carrier = None if carry is None else carry(self._group)
        self._is_here = self._carrier is None or self._carrier.is_here
        self._part = (self._rank, self._group.size()) if self._carrier is None else self._carrier.part
        self._stager = Stager()
        self._owned_elsewhere: set[str] = set()
        self._shapes: dict[str, torch.Tensor] = {}
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None
        self._retries = Retries()
        self._damaged: set[int] = set()
        # Duration of the last published save that this rank knows of.
        self.write_seconds: float | None = None
        if self._is_publisher:
            folder.mkdir(parents=True, exist_ok=True)
            sweep_checkpoints(folder)
        dist.barrier(self._group)

    def rehearse(self, tensors: Mapping[str, Any]) -> None:
        """Test a save with a few bytes, and check for the space of a checkpoint; leaves no files.

        Also assigns tensors that several ranks hold to one of them: only this rank copies them in later saves. With a
        GPU, begins to allocate the buffers of its copies.

        Raises:
            CheckpointError: the same on every rank; the message has the bytes needed and free if space is the reason.
        """
        # `numel` of a DTensor is that of the full tensor.
        part = 1.0 if self._carrier is None else self._carrier.kept_fraction
        sizes = {name: round(part * value.numel() * value.element_size()) for name, value in tensors.items()}
        rehearse_save(self._folder, sizes, self._group, self._is_here)
        self._owned_elsewhere = tensors.keys() - find_owned(tensors, self._group)
        self._stager.prepare(self._own(tensors))
        if self._carrier is not None:
            self._shapes = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int | None = None) -> None:
        """Save a checkpoint, and remove all but the newest few.

        Args:
            tensors: name to tensor or DTensor; nothing else. This rank copies those that `rehearse` assigned to it, and
                those that were not rehearsed.
            state: JSON values, the same on every rank.
            keep: a step whose checkpoint is also kept.

        Raises:
            CheckpointError: this save, or the previous one, was the third consecutive failure.
        """
        self.wait()
        if self._carrier is None and not self._folder.is_dir():  # DCP would create it again
            raise self._save_error(f"{self._folder} no longer exists")
        began = time.monotonic()
        self._retries.begin(step)
        self._tell("save", step)
        writing = Checkpoint(step, self._folder / f".writing-{step:08d}")
        target = writing.path if self._carrier is None else self._carrier.writing(writing.path)
        writer = FileSystemWriter(target, single_file_per_rank=True, sync_files=True)
        try:
            written = async_save(
                self._own(tensors), storage_writer=writer, async_stager=self._stager, process_group=self._group
            )
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            raise self._save_error(find_reason(error)) from error
        logger.debug(f"checkpoint: step {step} is copied after {time.monotonic() - began:.2f} s; writing")
        assert isinstance(written, Future)
        self._pending = self._publisher.submit(self._finish, began, written, writing, dict(state), keep)
        if not self.asynchronous:
            self.wait()

    def _own(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors that this rank copies."""
        return {name: tensor for name, tensor in tensors.items() if name not in self._owned_elsewhere}

    def wait(self) -> bool:
        """Wait until a pending save is published; return False if the newest save failed and must be retried.

        Raises:
            CheckpointError: it was the third consecutive failure.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            reason = pending.result()
            self._retries.end(failed=reason is not None)
            if self._retries.num_failures >= MAX_FAILURES:
                raise self._save_error(f"{reason}; it was the third consecutive failure")
        return not self._retries.is_needed

    def agree_on_retry(self, step: int) -> bool:
        """Agree on whether a failed save must be retried after this step. Must be called after every step.

        Ranks see a save end at different times. So 1, 2, 4, 8... steps after a save began, and at no other step, an
        all-reduce of one number on the CPU finds out whether it has ended everywhere.
        """
        if self._pending is not None and self._retries.take_look(step):
            ended = torch.tensor(int(self.is_idle))
            dist.all_reduce(ended, dist.ReduceOp.MIN, group=self._control)
            if ended.item():
                self.wait()
        return self._retries.is_due(step)

    def close(self, time_left: Callable[[], float] = lambda: math.inf) -> None:
        """Wait for the pending save and upload, and release the thread. No rank returns before rank 0's upload ends.

        `time_left` is polled: the wait for the upload ends when it is 0 on any rank.
        """
        self.wait()
        self._publisher.shutdown()
        is_over = torch.tensor(0)
        while not is_over:
            is_over.fill_(time_left() <= 0 or (self._is_publisher and self._await_uploads(time_left())))
            dist.all_reduce(is_over, dist.ReduceOp.MAX, group=self._control)
        if self._uploads is not None:
            self._uploads.tell_unfinished()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Its process groups, which `close` leaves open."""
        return self._group, self._control

    @property
    def is_idle(self) -> bool:
        """Whether this rank writes no checkpoint at this moment. Not collective."""
        return self._pending is None or self._pending.done()

    @property
    def is_saving(self) -> bool:
        """Whether the newest save is not known to be complete."""
        return self._pending is not None or self._retries.is_needed

    def drop(self) -> None:
        """After the process group has ended: wait until this rank's part of a pending save has. Not collective."""
        self._publisher.shutdown()
        self.abandon()

    def abandon(self) -> None:
        """After a failure, wait briefly for the current upload, and log what is not uploaded. Not collective."""
        if self._uploads is not None:
            self._uploads.wait(_ABANDONED_SECONDS)
            self._uploads.tell_unfinished()

    def upload_newest(self, step: int, keep: int | None) -> None:
        """On rank 0, upload the checkpoint that a start resumes from, unless the store has it. Not collective."""
        if self._uploads is not None and step:
            self._uploads.offer(self._published(step), keep, if_missing=True)

    def _await_uploads(self, seconds: float) -> bool:
        return self._uploads is None or self._uploads.wait(min(seconds, 1.0))

    def _published(self, step: int) -> Checkpoint:
        return Checkpoint(step, self._folder / f"step-{step:08d}")

    def newest(self, beyond: int = -1) -> Checkpoint | None:
        """Return the newest intact checkpoint, the same on every rank; damaged ones are skipped with a warning.

        Returns None if there is none with a step above `beyond`.

        All files are read and compared with their checksums, which takes as long as reading or hashing them. The ranks
        divide the files: under an unchanged plan, each checks as many as it wrote. Without a shared folder, the ranks
        of rank 0's machine verify all.
        """
        checkpoints = broadcast_object(find_checkpoints(self._folder) if self._is_publisher else [], self._group)
        for checkpoint in reversed([checkpoint for checkpoint in checkpoints if checkpoint.step > beyond]):
            began = time.monotonic()
            if self._carrier is None and self._is_publisher:
                complete(checkpoint.path)
            dist.barrier(self._group)
            mine = find_faults(checkpoint.path, True, *self._part, whole=self._carrier is None) if self._is_here else []
            faults = list(dict.fromkeys(chain(*gather_objects(mine, self._group))))
            seconds = time.monotonic() - began
            if seconds > _LONG_SECONDS and self._is_publisher:
                logger.info(f"Verifying the checksums of {checkpoint.path.name} took {seconds:.0f} s.")
            local = checkpoint
            if not faults and self._carrier is not None:
                local, faults = self._carrier.bring(checkpoint, self._shapes)
            if not faults:
                return local
            self._damaged.add(checkpoint.step)
            if self._is_publisher:
                logger.warning(f"Skipping a damaged checkpoint: {checkpoint.path}: {'; '.join(faults)}.")
        return None

    def load(self, checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> None:
        """Fill `tensors` in place, whatever plan wrote the checkpoint.

        Raises:
            CheckpointError: the checkpoint is hostile, lacks a tensor, or has another shape.
        """
        fill_tensors(checkpoint.path, tensors, process_group=self._group)
        if self._carrier is not None:
            self._carrier.clear()

    @property
    def _is_publisher(self) -> bool:
        return self._rank == 0

    def _finish(
        self, began: float, written: "Future[Any]", writing: Checkpoint, state: dict[str, Any], keep: int | None
    ) -> str | None:
        """In the thread, publish a save after all ranks have written. Returns why it failed, the same on every rank."""
        mine = self._describe_written(written, writing.path)
        checkpoint = self._published(writing.step)
        logger.debug(f"checkpoint: step {checkpoint.step} is written here after {time.monotonic() - began:.2f} s")
        reports = gather_objects(mine, self._group)
        reason = next((report for report, _ in reports if report is not None), None)
        described = {name: entry for _, report in reports for name, entry in report.items()}
        if self._carrier is not None:
            ends = reason is not None or self._send(writing, state, mine[1], described)
            reason = self._carrier.discard(writing.path, reason) if ends else self._carrier.collect(writing.path)
        if self._is_publisher:
            if reason is None:
                reason = self._publish(writing.path, checkpoint, state, described)
            if reason is None:
                self._conclude(checkpoint, keep, time.monotonic() - began)
            else:
                self._give_up(checkpoint, reason)
        reason = gather_objects(reason, self._group)[0]  # every rank waits for all others here
        if reason is None:
            self.write_seconds = time.monotonic() - began
        return reason

    def _describe_written(self, written: "Future[Any]", writing: Path) -> tuple[str | None, dict[str, Any]]:
        """Return why this rank could not write, or None, and the sizes and checksums of its files.

        Each rank hashes its own files: one rank alone would take as many times longer as there are ranks.
        """
        try:
            written.result()
            mine = writing if self._carrier is None else self._carrier.writing(writing)
            return None, describe_files(list_files(mine, f"__{self._rank}_*"))
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            return find_reason(error), {}

    def _publish(self, writing: Path, checkpoint: Checkpoint, state: dict[str, Any], described: Files) -> str | None:
        """On rank 0, publish the checkpoint. Returns why that failed, or None."""
        self._tell("publish", checkpoint.step)
        try:
            publish(writing, checkpoint.path, state, described)
        except Exception as error:
            return find_reason(error)
        return None

    def _send(self, written: Checkpoint, state: dict[str, Any], mine: Files, described: Files) -> bool:
        """Upload a checkpoint from all machines at once. Returns whether that worked; if not, rank 0 collects it."""
        if self._carrier is None or self._carrier.store is None:
            return False
        folder = None if self._uploads is None else self._uploads.begin(written)
        reason, is_sent = self._carrier.upload(written.path, folder, mine), False
        if reason is None and self._uploads is not None:
            try:
                write_json(written.path / STATE, state)
                write_manifest(written.path, described)
                if self._uploads.finish(described):
                    write_json(written.path / ELSEWHERE, {"url": f"{self._carrier.store.url}/{folder}"})
                    is_sent = True
            except Exception as error:
                reason = find_reason(error)
        if reason is not None:
            logger.debug(f"checkpoint: step {written.step} is not uploaded by all machines: {reason}")
        return broadcast_object(is_sent, self._group)

    def _conclude(self, checkpoint: Checkpoint, keep: int | None, seconds: float) -> None:
        """After a successful save, record the event and remove old checkpoints."""
        self._damaged.discard(checkpoint.step)
        is_sent = (checkpoint.path / ELSEWHERE).exists()
        uploading = () if self._uploads is None else self._uploads.offer(checkpoint, keep, if_missing=is_sent)
        self._tell("checkpoint", checkpoint.step, seconds=seconds)
        try:
            prune(self._folder, self._keep_last, (keep, *uploading), self._damaged)
        except OSError as error:
            logger.warning(f"{checkpoint.path.name} is saved, but an older checkpoint could not be removed: {error}.")

    def _give_up(self, checkpoint: Checkpoint, reason: str) -> None:
        """After a failed save, remove its files, log a warning and record the event."""
        sweep_checkpoints(self._folder)
        count = self._retries.num_failures + 1
        plan = "" if count == MAX_FAILURES else "; it will be retried"
        name = checkpoint.path.name
        logger.warning(
            f"The checkpoint {name} could not be written: {reason} (failure {count} of {MAX_FAILURES}{plan})."
        )
        self._tell("save_failed", checkpoint.step, reason=reason)

    def _tell(self, event: str, step: int, **fields: Any) -> None:
        if self._is_publisher:
            with suppress(OSError):  # the disk may be full
                self._note(event, step=step, **fields)

    def _save_error(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint step-{self._retries.began_at:08d} could not be written: {reason}. Earlier checkpoints in "
            f"{self._folder} are unchanged, the last good one is {describe_newest(self._folder)}; free space or choose "
            "another run.dir, and run the same command again."
        )
