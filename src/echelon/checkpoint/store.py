"""Saving, publishing, finding and loading checkpoints.

A checkpoint is written into a hidden folder beside its final place. When every rank's file is complete, rank 0 adds
`state.json` and a manifest of sizes and checksums, flushes all of it to disk and renames the folder. What stands under
`checkpoints/step-*` is therefore whole; what a killed run leaves behind is hidden, never read, and swept by the next.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from echelon.checkpoint.safety import SafeReader, read_metadata
from echelon.errors import CheckpointError, ConfigError, is_disk_full
from echelon.run_folder import is_run, sync_folder, write_json

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"

# What torch's writer says, without an errno, when a disk takes only the beginning of a file.
_CUT_SHORT = re.compile(r"PytorchStreamWriter failed|unexpected pos|file write failed")


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its step and its folder."""

    step: int
    path: Path

    def read_state(self) -> dict[str, Any]:
        """The run's counters at this step: everything of a checkpoint that is not a tensor."""
        state: dict[str, Any] = json.loads((self.path / STATE).read_text())
        return state


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """The published checkpoints of a run's `checkpoints/`, oldest first. Whether they are whole is not checked here."""
    steps = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return [Checkpoint(int(path.name.removeprefix("step-")), path) for path in sorted(steps)]


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """The published checkpoints of a run folder, oldest first."""
    return find_checkpoints(run / "checkpoints")


def newest_of(run: Path) -> Checkpoint:
    """A run's newest checkpoint. Raises ConfigError where there is none, CheckpointError where it is damaged."""
    newest = _some_checkpoints(run)[-1]
    try:
        check_files(newest.path)
    except CheckpointError as error:
        raise CheckpointError(
            f"The newest checkpoint is damaged: {error} Remove {newest.path} to use the one before it, or let "
            "`echelon train` write it again."
        ) from error
    return newest


def checkpoint_of(run: Path, which: str | None = None) -> Checkpoint:
    """The checkpoint of a run that a user names: newest (the default), best, or a step.

    The best one is that of the lowest evaluation loss, which `checkpoint.keep_best` keeps. Raises ConfigError where
    there is none, naming those there are; CheckpointError where it is damaged.
    """
    if which is None or which == "newest":
        return newest_of(run)
    steps = {checkpoint.step: checkpoint for checkpoint in _some_checkpoints(run)}
    have = f"{run} has steps {', '.join(map(str, steps))}"
    if which == "best":
        step = newest_of(run).read_state()["train"].get("best_step")
        if step not in steps:
            raise ConfigError(
                f"--checkpoint best: no checkpoint of the lowest evaluation loss was kept; {have}. Train with "
                "checkpoint.keep_best=true to keep it."
            )
    elif which.isdecimal() and int(which) in steps:
        step = int(which)
    else:
        raise ConfigError(f"--checkpoint {which}: use newest, best or a step; {have}.")
    check_files(steps[step].path)
    return steps[step]


def _some_checkpoints(run: Path) -> list[Checkpoint]:
    checkpoints = list_checkpoints(run)
    if not checkpoints and not is_run(run):
        raise ConfigError(f"{run} is not a run folder (it has no recipe.yaml); give one, for example runs/NAME.")
    if not checkpoints:
        raise ConfigError(f"{run} has no checkpoint yet; run `echelon train` until one is saved.")
    return checkpoints


def find_newest(folder: Path, say: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones are passed over, each with a line."""
    for checkpoint in reversed(find_checkpoints(folder)):
        try:
            check_files(checkpoint.path)
        except CheckpointError as error:
            say(f"Passing over a damaged checkpoint: {error}")
        else:
            return checkpoint
    return None


def check_files(folder: Path, checksums: bool = False) -> None:
    """Compare a checkpoint's files with its manifest: names and sizes, and contents if asked.

    Raises:
        CheckpointError: naming the first file that is missing or differs.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no readable {MANIFEST} ({error}).") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest.get('format')}; this version reads format {FORMAT}.")
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing.")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{folder}: {name} has {path.stat().st_size} bytes; {entry['bytes']} were written.")
        if checksums and file_digest(path) != entry["sha256"]:
            raise CheckpointError(f"{folder}: the contents of {name} changed after it was written.")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CheckpointStore:
    """Saves a run's checkpoints in the background, one at a time, and keeps the newest few.

    Every method is collective. Saves run in a thread, over a gloo group of their own; the tensors are copied before
    `save` returns.
    """

    def __init__(
        self, folder: Path, keep_last: int, asynchronous: bool, on_published: Callable[[Checkpoint], None] | None = None
    ) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._on_published = on_published
        self._group = dist.new_group(backend="gloo")
        self._is_publisher = dist.get_rank() == 0
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if self._is_publisher:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".writing-*"):
                shutil.rmtree(leftover)
        dist.barrier(self._group)

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int | None = None) -> None:
        """Save one checkpoint, and remove what is beyond the newest few.

        Args:
            tensors: name to tensor or DTensor; nothing else.
            state: JSON values, the same on every rank.
            keep: a step whose checkpoint stays besides.

        Raises:
            CheckpointError: this save, or the one before it, could not be written.
        """
        self.wait()
        final = self._folder / f"step-{step:08d}"
        writing = self._folder / f".writing-{step:08d}"
        writer = FileSystemWriter(writing, single_file_per_rank=True, sync_files=True)
        try:
            written = async_save(dict(tensors), storage_writer=writer, process_group=self._group)
        except (Exception, CheckpointException) as error:
            raise _save_error(final, error) from error
        assert isinstance(written, Future)
        self._pending = self._publisher.submit(
            self._finish, written, writing, Checkpoint(step, final), dict(state), keep
        )
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way, if any, is published. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise CheckpointError now if the save under way has failed already. Waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait, and release the thread."""
        self.wait()
        self._publisher.shutdown()

    def newest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, the same one on every rank: rank 0 looks."""
        found = [find_newest(self._folder, say) if self._is_publisher else None]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def load(self, checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> None:
        """Fill `tensors` in place, whatever plan wrote the checkpoint.

        Raises:
            CheckpointError: the checkpoint is hostile, lacks a tensor, or holds another shape.
        """
        check_shapes(checkpoint.path, tensors)
        load(dict(tensors), storage_reader=SafeReader(checkpoint.path), process_group=self._group)

    def _finish(
        self,
        written: "Future[Any]",
        writing: Path,
        checkpoint: Checkpoint,
        state: dict[str, Any],
        keep: int | None,
    ) -> None:
        try:
            written.result()
            if self._is_publisher:
                publish(writing, checkpoint.path, state)
                prune(self._folder, self._keep_last, keep)
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            if self._is_publisher:
                shutil.rmtree(writing, ignore_errors=True)
            raise _save_error(checkpoint.path, error) from error
        if self._is_publisher and self._on_published is not None:
            self._on_published(checkpoint)


def publish(writing: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Complete a written folder and give it its name, so that it is either whole or absent after any crash."""
    write_json(writing / STATE, dict(state))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for path in sorted(writing.iterdir())
    }
    write_json(writing / MANIFEST, {"format": FORMAT, "files": files})
    sync_folder(writing)
    if final.exists():  # a step saved again after a resume: the new one replaces it
        shutil.rmtree(final)
    writing.rename(final)
    sync_folder(final.parent)


def prune(folder: Path, keep_last: int, keep: int | None = None) -> None:
    """Remove all but the newest checkpoints, and the one of the step `keep`."""
    for checkpoint in find_checkpoints(folder)[:-keep_last]:
        if checkpoint.step != keep:
            shutil.rmtree(checkpoint.path)


def check_shapes(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Whether a checkpoint holds every tensor asked for, in the same whole shape. Raises CheckpointError."""
    saved = read_metadata(folder).state_dict_metadata
    for name, tensor in tensors.items():
        entry = saved.get(name)
        if entry is None:
            raise CheckpointError(f"Checkpoint {folder} has no {name}; it belongs to another model or optimizer.")
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != tensor.shape:
            raise CheckpointError(
                f"Checkpoint {folder} holds {name} as {tuple(entry.size)} and the recipe's model has "
                f"{tuple(tensor.shape)}."
            )


def load_alone(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, whole or sharded, from a checkpoint: each process reads its own part. Raises CheckpointError."""
    check_files(folder)
    check_shapes(folder, tensors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be
        load(dict(tensors), storage_reader=SafeReader(folder), no_dist=True)


def _save_error(final: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {final.name} could not be written: {_find_reason(error)}. Earlier checkpoints in "
        f"{final.parent} are untouched; make room or choose another run.dir, and start the same command again."
    )


def _find_reason(error: BaseException) -> str:
    """What went wrong on the first rank that failed; DCP wraps the errors of all of them into one of its own."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip()
    if is_disk_full(error) or "No space left" in text:
        return "No space left on device: the disk is full"
    if _CUT_SHORT.search(text):
        return "a file was cut short, as on a full disk"
    return (text.splitlines() or [type(error).__name__])[0]
