"""Reads untrusted DCP checkpoints.

DCP pickles its own `.metadata`, and unpickles it and every entry that is not a tensor. Here the metadata goes through
an unpickler that admits DCP's own classes only, entries of bytes are refused, and no file outside the folder is opened.
"""

import io
import pickle
import struct
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from echelon.errors import CheckpointError

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
    ("pathlib._local", "PosixPath"),  # its home since Python 3.13
}
DTYPES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class MetadataUnpickler(pickle._Unpickler):
    """Admits the classes that DCP's metadata is made of, and nothing that can run code.

    The one of pickle's two that is written in Python: the other makes room for as many gigabytes as a file asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Raises CheckpointError for every class that is not on the list."""
        if (module, name) in ADMITTED or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise CheckpointError(
            f"its .metadata names {module}.{name}, which no checkpoint of echelon holds; it was not read"
        )


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint folder, checked to describe tensors alone, in files of this folder alone.

    Raises:
        CheckpointError: the metadata is missing, damaged, or holds anything else.
    """
    try:
        metadata = MetadataUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        refusal = _find_refusal(metadata)
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


def _find_refusal(metadata: Any) -> str | None:
    """Why what was unpickled is not to be used; None if it may be."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, (dict, OrderedDict)):
        return "its .metadata is not DCP's"
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            return f"{name} is not a tensor but pickled bytes"
    for info in metadata.storage_data.values():
        if PurePath(info.relative_path).name != info.relative_path:
            return f"it points at {info.relative_path}, outside its folder"
    return None


class SafeReader(FileSystemReader):
    """DCP's file reader with the metadata read safely. Tensors are read with `weights_only` by DCP itself."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See read_metadata above."""
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata
