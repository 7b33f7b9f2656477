"""The `checkpoints/` folder of a run: finds, verifies, publishes and removes checkpoints. Does not import torch.

A checkpoint is `step-00000100/`, with a manifest of the size and checksum of each of its files. It gets and loses that
name in one rename, so that a process may be killed at any time: an incomplete folder has a hidden name, is never read,
and is removed by the next start.
"""

import hashlib
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.ground.checksums import (
    ELSEWHERE,
    MANIFEST,
    check_files,
    find_absent,
    find_faults,
    parse_manifest,
    remove_tree,
    write_manifest,
)
from echelon.ground.errors import CheckpointError, ConfigError, EchelonError
from echelon.ground.run_files import is_run, sweep_checkpoints
from echelon.ground.stored import parse_json, read_bytes, read_json, sync_path, write_json

logger = logging.getLogger(__name__)

STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its step and its folder."""

    step: int
    path: Path

    def read_state(self) -> dict[str, Any]:
        """Read the run's counters at this step, all content that is not a tensor. Raises CheckpointError."""
        try:
            content = read_bytes(self.path / STATE)
            if hashlib.sha256(content).hexdigest() != read_json(self.path / MANIFEST)["files"][STATE]["sha256"]:
                raise ValueError("it was changed after it was written")
            state: dict[str, Any] = parse_json(content)
            if not isinstance(state.get("train"), dict):
                raise ValueError("it has no counters")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path / STATE} is unusable: {error}.") from error
        return state


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the published checkpoints of a run's `checkpoints/`, oldest first, without verifying them."""
    steps = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return [Checkpoint(int(path.name.removeprefix("step-")), path) for path in sorted(steps) if path.is_dir()]


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Return the published checkpoints of a run folder, oldest first, without verifying them."""
    return find_checkpoints(run / "checkpoints")


def require_run(run: Path) -> None:
    """Raise ConfigError unless the folder is a run folder or contains checkpoints like one."""
    if not is_run(run) and not list_checkpoints(run):
        raise ConfigError(f"{run} is not a run folder (it has no recipe.yaml); give one, for example runs/NAME.")


def newest_of(run: Path, checksums: bool = False) -> Checkpoint:
    """Return a run's newest checkpoint after checking its files; with `checksums`, also their contents.

    Raises ConfigError if there is none, CheckpointError if it is damaged.
    """
    newest = _some_checkpoints(run)[-1]
    complete(newest.path)
    try:
        check_files(newest.path, checksums)
    except CheckpointError as error:
        raise CheckpointError(
            f"The newest checkpoint is damaged: {error} Remove {newest.path} to use the one before it, or let "
            "`echelon train` write it again."
        ) from error
    return newest


def checkpoint_of(run: Path, which: str | None = None) -> Checkpoint:
    """Return the checkpoint that a user chose (see `find_checkpoint`), after verifying its checksums.

    Raises ConfigError if there is none, CheckpointError if it is damaged.
    """
    if which is None or which == "newest":
        return newest_of(run, checksums=True)
    checkpoint = find_checkpoint(run, which)
    complete(checkpoint.path)
    check_files(checkpoint.path, checksums=True)
    return checkpoint


def find_checkpoint(run: Path, which: str | None = None) -> Checkpoint:
    """Return the checkpoint that a user chose, without reading its tensors: newest (the default), best, or a step.

    The best one has the lowest evaluation loss; `checkpoint.keep_best` keeps it. Raises ConfigError if there is none,
    with the steps that exist.
    """
    if which is None or which == "newest":
        return _some_checkpoints(run)[-1]
    steps = {checkpoint.step: checkpoint for checkpoint in _some_checkpoints(run)}
    have = f"{run} has steps {', '.join(map(str, steps))}"
    if which == "best":
        step = newest_of(run).read_state()["train"].get("best_step")
        if step is None:
            raise ConfigError(
                f"--checkpoint best: this run has no evaluation, so no checkpoint is best; {have}. Use newest or one "
                "of them, or train with train.eval_every and checkpoint.keep_best=true."
            )
        if step not in steps:
            raise ConfigError(
                f"--checkpoint best: the lowest evaluation loss was at step {step}, whose checkpoint was not kept; "
                f"{have}. Use newest or one of them, or train with checkpoint.keep_best=true."
            )
    elif which.isdecimal() and int(which) in steps:
        step = int(which)
    else:
        raise ConfigError(f"--checkpoint {which}: use newest, best or a step; {have}.")
    return steps[step]


def check_empty(out: Path) -> None:
    """Raise ConfigError if a path exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; choose a new folder.")


def _some_checkpoints(run: Path) -> list[Checkpoint]:
    require_run(run)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise ConfigError(f"{run} has no checkpoint yet; run `echelon train` until one is saved.")
    return checkpoints


def fetch_files(folder: Path, names: Collection[str] | None = None) -> list[str]:
    """Fetch the files of a checkpoint that this machine lacks from its object store, by default all of them.

    Returns a phrase for each that is damaged there. Raises ObjectStoreError, or OSError if the disk here is full.
    """
    # Here: most runs have no store.
    from echelon.ground import mirror
    from echelon.ground.object_store import ObjectStore

    url, _, source = read_json(folder / ELSEWHERE)["url"].rpartition("/")
    files = parse_manifest(read_bytes(folder / MANIFEST))[1]
    absent = find_absent(folder, {name: files[name] for name in files if names is None or name in names})
    return mirror.fetch(ObjectStore(url), source, absent, folder, mirror.RETRY_DELAYS_SECONDS)


def complete(folder: Path) -> None:
    """Fetch all files of a checkpoint that this machine lacks. Raises ObjectStoreError; damaged ones stay missing."""
    if (folder / ELSEWHERE).exists():
        logger.info(f"Fetching the files of {folder.name} that other machines wrote, from {find_source(folder)}.")
        try:
            if not fetch_files(folder):
                (folder / ELSEWHERE).unlink()
        except EchelonError as error:
            error.args = (f"{folder}: its other files, in {find_source(folder)}, cannot be read ({error}).",)
            raise


def find_source(folder: Path) -> str | None:
    """The address of the files of a checkpoint that this machine lacks; None if it has all."""
    with suppress(OSError):
        return str(read_json(folder / ELSEWHERE)["url"])
    return None


def publish(writing: Path, final: Path, state: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Complete a written folder and rename it to its final name, so that it is complete or absent after any crash.

    `described` has the manifest entries that are already known; the other files are read here.
    A checkpoint of the same name, from before a resume, is replaced. Between the two renames it has a hidden name, from
    which `sweep_checkpoints` can restore it; it is removed when the new one is on the disk.
    """
    if not (writing / ELSEWHERE).exists():  # an object store has these two files already
        write_json(writing / STATE, dict(state))
        write_manifest(writing, described)
    give_name(writing, final)


def give_name(writing: Path, final: Path) -> None:
    """Publish a complete folder whose files are flushed to disk; replaces one of that name (see `publish`)."""
    sync_path(writing)
    replaced = final.with_name(f".replaced-{final.name.removeprefix('step-')}")
    if final.exists():
        final.rename(replaced)
    writing.rename(final)
    sync_path(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(folder: Path, keep_last: int, keep: Collection[int | None] = (), damaged: Collection[int] = ()) -> None:
    """Remove checkpoints older than the newest `keep_last` intact ones, except those of the steps `keep`.

    A checkpoint counts as intact if all its files exist with the right sizes and its step is not in `damaged`.
    """
    steps = {checkpoint.step: checkpoint for checkpoint in find_checkpoints(folder)}
    whole = [step for step, checkpoint in steps.items() if step not in damaged and not find_faults(checkpoint.path)]
    oldest = whole[-keep_last] if len(whole) >= keep_last else 0
    for step, checkpoint in steps.items():
        if step < oldest and step not in keep:
            remove(checkpoint)


def clear_out(folder: Path, keep: int) -> Iterator[str]:
    """Remove all but the newest `keep` intact checkpoints and the best one, also damaged and incomplete ones.

    Reads every checkpoint. The caller must hold the run's lock. Yields a line for each removed checkpoint, and one
    with those that were kept.

    Raises:
        CheckpointError: all checkpoints are damaged; nothing is removed.
    """
    damage = {checkpoint: find_faults(checkpoint.path, checksums=True) for checkpoint in find_checkpoints(folder)}
    whole = [checkpoint for checkpoint, faults in damage.items() if not faults]
    if damage and not whole:
        raise CheckpointError(
            f"All checkpoints in {folder} are damaged, so none was removed; `echelon checkpoint verify` lists the "
            "damage. Delete those that you do not need by hand."
        )
    kept = _choose_kept(whole, keep)
    for name in sweep_checkpoints(folder):
        yield f"removed {name}: a killed process left it incomplete"
    for checkpoint, faults in damage.items():
        if checkpoint not in kept:
            remove(checkpoint)
            yield f"removed {checkpoint.path.name}" + (f": damaged: {'; '.join(faults)}" if faults else "")
    yield f"kept {', '.join(checkpoint.path.name for checkpoint in kept) or 'nothing: there is no checkpoint yet'}"


def _choose_kept(whole: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """Return the newest `keep` checkpoints, and the best one according to the newest; in order."""
    best = whole[-1].read_state()["train"].get("best_step") if whole else None
    return [checkpoint for checkpoint in whole if checkpoint in whole[-keep:] or checkpoint.step == best]


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint: first rename it to a hidden name, then delete its files."""
    removing = checkpoint.path.with_name(f".removing-{checkpoint.path.name.removeprefix('step-')}")
    shutil.rmtree(removing, ignore_errors=True)
    checkpoint.path.rename(removing)
    remove_tree(removing)


def describe_newest(folder: Path) -> str:
    """Return the name of the newest checkpoint (see `newest_whole`) for a message; "none" without one."""
    newest = newest_whole(folder)
    return "none" if newest is None else newest.path.name


def newest_whole(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint whose files all exist with the right sizes."""
    return next(
        (checkpoint for checkpoint in reversed(find_checkpoints(folder)) if not find_faults(checkpoint.path)), None
    )
