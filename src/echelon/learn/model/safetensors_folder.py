"""Reads tensors of an HF checkpoint folder by name and slice, from its safetensors files.

Does not import torch before a tensor is read.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from safetensors import SafetensorError, safe_open

from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes of plain numbers: torch's name of each by that of safetensors."""

Take = Callable[..., "Tensor"]
"""Reads a stored tensor by its name, whole; or one block of it, given as slices after the name."""


@dataclass(frozen=True)
class StoredWeight:
    """What the header of a file says of one tensor. `dtype`: as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class SafetensorsFolder:
    """The weights of an HF checkpoint folder, read by name and slice. Only safetensors files (`files`) are opened."""

    is_quantized: ClassVar[bool] = False
    """Whether the files store weights quantized, in a format that is read as plain numbers."""

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if index.is_file():
            self.files = _read_index(index)
        elif single.is_file():
            with _opened(single, "np") as file:
                self.files = dict.fromkeys(file.keys(), single)
        else:
            raise ConfigError(
                f"model.checkpoint={path}: it has no model.safetensors; echelon reads safetensors only, never pickled "
                "weights: convert the checkpoint with `model.save_pretrained(...)` first."
            )

    def read_headers(self) -> dict[str, StoredWeight]:
        """Return what the headers say of each tensor. Raises CheckpointError, like every method that reads."""
        headers: dict[str, StoredWeight] = {}
        groups: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            groups.setdefault(path, []).append(name)
        for path, names in groups.items():
            with _opened(path, "np") as file:
                for name in names:
                    stored = file.get_slice(name)
                    headers[name] = StoredWeight(path, tuple(stored.get_shape()), stored.get_dtype())
        return headers

    def find_dtype(self) -> "torch.dtype":
        """Return the dtype of the first weight that is stored as floating-point numbers; fp32 if there is none."""
        import torch

        dtypes = (FLOATING[header.dtype] for header in self.read_headers().values() if header.dtype in FLOATING)
        dtype: torch.dtype = getattr(torch, next(dtypes, "float32"))
        return dtype

    def read(self, name: str, block: tuple[slice, ...]) -> "Tensor":
        """Read one block of a tensor without reading the rest."""
        with self.taking() as take:
            return take(name, *block)

    def read_whole(self, names: Iterable[str]) -> "dict[str, Tensor]":
        """Read full tensors, by name."""
        with self.taking() as take:
            return {name: take(name) for name in names}

    @contextmanager
    def taking(self) -> Iterator[Take]:
        """Yield a function that reads, and opens each file once."""
        with ExitStack() as files:
            opened: dict[Path, Any] = {}

            def take(name: str, *block: slice) -> "Tensor":
                path = self.files[name]
                if path not in opened:
                    opened[path] = files.enter_context(_opened(path))
                tensor: Tensor = opened[path].get_slice(name)[block] if block else opened[path].get_tensor(name)
                return tensor

            yield take


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor; all must be in the index's folder."""
    try:
        files = {name: path.parent / file for name, file in read_json(path)["weight_map"].items()}
        for file in files.values():
            if file.parent != path.parent or file.suffix != ".safetensors" or not file.is_file():
                raise ValueError(f"it names {str(file)[:200]!r}, which is not a safetensors file in its folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error)[:300]  # which may quote a name of any length
        raise CheckpointError(f"{path} cannot be read ({reason}); download or copy the file again.") from error
    return files


@contextmanager
def _opened(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a file; "np" for its header alone, which needs no torch."""
    try:
        try:
            opened = safe_open(path, framework=framework)
        except MemoryError as error:  # the whole file is mapped
            raise ValueError(f"it has {render_bytes(path.stat().st_size)}, which cannot be mapped") from error
        with opened as file:
            yield file
    except (OSError, SafetensorError, ValueError, OverflowError) as error:
        reason = str(error).strip()[:300]
        raise CheckpointError(f"{path} cannot be read ({reason}); download or copy the file again.") from error
