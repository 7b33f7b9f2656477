"""Fills tensors from a checkpoint, whatever plan wrote it, and runs no code of a hostile one.

DCP pickles its own `.metadata`, and unpickles it and every entry that is not a tensor. Here an unpickler that admits
only DCP's own classes reads the metadata, entries of bytes are refused, and no file outside the folder is opened.
"""

import io
import logging
import pickle
import re
import struct
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from echelon.ground.checksums import check_files
from echelon.ground.errors import CheckpointError, is_disk_full
from echelon.ground.stored import MAX_ROWS_BYTES, read_bytes
from echelon.learn.distributed.replica_names import find_ranks, match_replicas

logger = logging.getLogger(__name__)
# Messages of torch's writer, without an errno, when the disk fills up in the middle of a file.
_CUT_SHORT = re.compile(r"PytorchStreamWriter failed|unexpected pos|file write failed")


def fill_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Fill tensors in place, full or sharded. Collective, unless `options` of DCP's `load` contain `no_dist`.

    Tensors that differ between replicas (`replica_names.py`) may come from another number of replicas. Those of a rank
    are set to 0 if another number of ranks saved them.

    Raises:
        CheckpointError: the checkpoint is hostile, lacks a tensor, or has another shape.
    """
    saved = read_metadata(folder).state_dict_metadata
    matched = match_replicas(_drop_ranks(tensors, saved, options.get("process_group")), saved)
    for name, tensor in matched.items():
        entry = saved.get(name)
        if entry is None:
            raise CheckpointError(f"Checkpoint {folder} has no {name}; it belongs to another model or optimizer.")
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != tensor.shape:
            raise CheckpointError(
                f"Checkpoint {folder} has {name} with shape {tuple(entry.size)}, and the recipe's model has shape "
                f"{tuple(tensor.shape)}; it belongs to another model."
            )
    try:
        load(dict(matched), storage_reader=SafeReader(folder), **options)
    except CheckpointException as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {find_reason(error)}.") from error


def find_needed(folder: Path, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the files that this rank reads to fill its tensors, which may be on the meta device."""
    metadata = read_metadata(folder)
    sizes = {name: getattr(entry, "size", None) for name, entry in metadata.state_dict_metadata.items()}
    matched = match_replicas(tensors, sizes)
    fitting = {name: tensor for name, tensor in matched.items() if sizes.get(name) == tensor.shape}
    items = create_default_local_load_plan(fitting, metadata).items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


def _drop_ranks(
    tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Mapping[str, torch.Tensor]:
    """Return the tensors without those of ranks if the number of ranks has changed; the others are set to 0."""
    dropped = {name: tensor for name, tensor in tensors.items() if find_ranks([name])}
    count = len(find_ranks(saved))
    if not dropped or not dist.is_initialized() or count == dist.get_world_size(group):
        return tensors
    for tensor in dropped.values():
        tensor.zero_()
    if dist.get_rank(group) == 0:
        logger.warning(
            f"The checkpoint has gradients that {count} processes had not sent yet (sync.compress). There are "
            f"{dist.get_world_size(group)} processes now, so these gradients are dropped."
        )
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}


def load_alone(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, full or sharded, without communication: each process reads its own part. Raises CheckpointError."""
    check_files(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        fill_tensors(folder, tensors, no_dist=True)


def find_reason(error: BaseException) -> str:
    """Return the reason of the first rank that failed; DCP wraps the errors of all ranks into one exception."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip()
    if is_disk_full(error) or "No space left" in text:
        return "No space left on device: the disk is full"
    if _CUT_SHORT.search(text):
        return "a file was truncated; the disk may be full"
    return (text.splitlines() or [type(error).__name__])[0]


ADMITTED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",  # admitted so that the refusal can name the entry
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its module since Python 3.13
}
DTYPES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class MetadataUnpickler(pickle._Unpickler):
    """Admits the classes that DCP's metadata consists of, and nothing that can run code.

    Based on pickle's pure Python unpickler: the C one allocates as many gigabytes as a file asks for. The only code
    with which the Python one does so makes a bytearray, which DCP's metadata has none of.
    """

    def _refuse_bytearray(self) -> None:
        raise pickle.UnpicklingError("it has a bytearray, which no checkpoint contains")

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BYTEARRAY8[0]: _refuse_bytearray}

    @override
    def find_class(self, module: str, name: str) -> Any:
        """Return an admitted class. Raises CheckpointError for any other."""
        if (module, name) == ("builtins", "getattr"):
            return _get_memory_format
        if (module, name) in ADMITTED or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise CheckpointError(
            f"its .metadata names {module}.{name}, which no checkpoint of echelon contains; it was not read"
        )


def _get_memory_format(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """What `getattr` stands for in the metadata that Python 3.11.0 to 3.11.3 writes: a member of DCP's only enum."""
    if kind is not _MEM_FORMAT_ENCODING or name not in list(_MEM_FORMAT_ENCODING.__members__):
        raise CheckpointError(
            f"its .metadata names the attribute {name!r:.80} of {kind!r:.80}, which no checkpoint of echelon contains"
        )
    return _MEM_FORMAT_ENCODING[name]


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a checkpoint folder; it may only describe tensors, in files of this folder.

    Raises:
        CheckpointError: the metadata is missing or damaged, or describes anything else.
    """
    try:
        metadata = MetadataUnpickler(io.BytesIO(read_bytes(folder / ".metadata", MAX_ROWS_BYTES))).load()
        refusal = _find_refusal(metadata, folder)
    except CheckpointError as error:
        raise CheckpointError(f"Checkpoint {folder} refused: {error}.") from error
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ValueError,
        IndexError,
        TypeError,
        KeyError,
        OverflowError,
        RuntimeError,
        struct.error,
    ) as error:
        raise CheckpointError(f"Checkpoint {folder}: its .metadata cannot be read ({error}).") from error
    if refusal is not None:
        raise CheckpointError(f"Checkpoint {folder} refused: {refusal}.")
    assert isinstance(metadata, Metadata)
    return metadata


def _find_refusal(metadata: Any, folder: Path) -> str | None:
    """Return the reason to refuse unpickled metadata; None if it may be used."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, (dict, OrderedDict)):
        return "its .metadata is not DCP's"
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            return f"{name} is not a tensor but pickled bytes"
    for info in metadata.storage_data.values():
        if PurePath(info.relative_path).name != info.relative_path:
            return f"it points at {info.relative_path}, outside its folder"
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        if (folder / name).exists() and not (folder / name).is_file():
            return f"{name} is not a regular file"
    return None


class SafeReader(FileSystemReader):
    """DCP's file reader that reads metadata safely. DCP itself reads tensors with `weights_only`."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata
