"""The folder of an export: whole or absent however its process ends, of one process at a time, and read back."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

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


def check_weights(path: Path, written: Mapping[str, Tensor], what: str) -> None:
    """Read a safetensors file back, one tensor at a time, and compare it bit for bit.

    Args:
        what: a description of the expected values for the message: trained, or written.

    Raises:
        CheckpointError: the file has other tensors, or a tensor differs.
        SafetensorError: the file cannot be read.
    """
    with safe_open(path, "pt") as file:
        for name in sorted(set(file.keys()) ^ written.keys()):
            raise CheckpointError(f"{path} {'lacks' if name in written else 'contains an unknown'} {name}.")
        for name, tensor in written.items():
            stored = file.get_tensor(name)
            if (stored.shape, stored.dtype) != (tensor.shape, tensor.dtype) or not torch.equal(
                _bits(stored), _bits(tensor)
            ):
                raise CheckpointError(f"{path}: {name} differs from the {what} values; the disk may be damaged.")


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, so that NaN equals NaN."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8)
