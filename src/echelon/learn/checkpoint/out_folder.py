"""The folder of an export: whole or absent however its process ends, and written by one process at a time."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.file_lock import FileLock, describe_mark
from echelon.learn.checkpoint.folder import check_empty


@contextmanager
def written_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `out`, which gets that name after the block, and is gone if the block raises.

    What a killed process has left of it is replaced, and with `replace` also `out`.

    Raises:
        ConfigError: `out` exists and is not an empty folder, without `replace`, or another process is writing it.
        CheckpointError: the folder cannot be created or renamed.
    """
    out = out.absolute()
    writing = out.with_name(f".writing-{out.name}")
    lock = FileLock(out.with_name(f"{writing.name}.lock"))
    with writing_explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        is_ours = lock.take()
    if not is_ours:
        holder = lock.read_holder() or "that has just ended"
        raise ConfigError(
            f"{out} is being written by another process, {holder}; wait for its end, or choose another OUT."
            f"{describe_mark(lock)}"
        )
    try:
        if not replace:
            check_empty(out)
        with writing_explained(out):
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
        yield writing
        with writing_explained(out):
            if replace:
                shutil.rmtree(out, ignore_errors=True)
            elif out.exists():
                out.rmdir()
            writing.rename(out)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
        lock.path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def writing_explained(out: Path) -> Iterator[None]:
    """Turn the errors of a block that writes to an export into a CheckpointError that names `out`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The export could not be written to {out}: {error}. Free space, or choose another folder."
        ) from error
