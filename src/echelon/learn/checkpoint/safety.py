"""Reads untrusted DCP checkpoints.

DCP pickles its own `.metadata`, and unpickles it and every entry that is not a tensor. Here an unpickler that admits
only DCP's own classes reads the metadata, entries of bytes are refused, and no file outside the folder is opened.
"""

import io
import pickle
import struct
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from typing_extensions import override

from echelon.ground.errors import CheckpointError
from echelon.ground.stored import MAX_ROWS_BYTES, read_bytes

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
