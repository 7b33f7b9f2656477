"""Filling a model with weights, one unit at a time, so that no rank ever holds the whole of it.

Initial weights depend on nothing but the seed and the unit's name: each unit is made whole on the CPU under a generator
of its own, by the model's own rules, and each rank copies its slice. Never initialise a sharded parameter in place:
DTensor's CPU generator gives every shard the same numbers.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from echelon.errors import CheckpointError, ConfigError
from echelon.manifest import read_json
from echelon.model.parts import weight_groups

_FLOATING = ("F64", "F32", "F16", "BF16")


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's own memory of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, skeleton: PreTrainedModel, seed: int) -> None:
    """Fill every parameter and buffer of `model` by the architecture's own rules.

    Args:
        model: materialised (`to_empty`), sharded or not.
        skeleton: the same model on meta, untouched by any transform.
        seed: run.seed; the same seed gives the same weights on any number of ranks and under any strategy.

    Raises:
        ConfigError: the architecture has a parameter that its own rules do not initialise.
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    filled: set[int] = set()
    for name, tensor in _initial_tensors(skeleton, seed, parameters=True):
        if id(targets[name]) not in filled:  # a tied weight keeps the values of the name it has first
            filled.add(id(targets[name]))
            local_part(targets[name]).copy_(tensor[local_slices(targets[name])])


@torch.no_grad()
def initialize_buffers(model: PreTrainedModel, skeleton: PreTrainedModel) -> None:
    """Rebuild what no checkpoint holds: rotary tables and other non-persistent buffers."""
    targets = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in _initial_tensors(skeleton, seed=0, parameters=False):
        targets[name].copy_(tensor)


def _initial_tensors(skeleton: PreTrainedModel, seed: int, parameters: bool) -> Iterator[tuple[str, Tensor]]:
    """Make each unit whole on the CPU and hand out its tensors: all of them, or only buffers."""
    for unit_name, module, whole in weight_groups(skeleton):
        if not parameters and not any(True for _ in module.buffers(recurse=whole)):
            continue
        unit = _make_unit(skeleton, unit_name, module, seed)
        tensors = dict(unit.named_buffers(prefix=unit_name, recurse=whole))
        if parameters:
            tensors |= dict(unit.named_parameters(prefix=unit_name, recurse=whole))
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise ConfigError(
                    f"model: {type(skeleton).__name__} has no rule that initialises {name}; give model.checkpoint "
                    "instead of model.config."
                )
            yield name, tensor


def _make_unit(skeleton: PreTrainedModel, name: str, module: nn.Module, seed: int) -> nn.Module:
    unit = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in [*unit.parameters(), *unit.buffers()]:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))  # what no rule touches must not pass for a number
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, name))
        unit.apply(skeleton._init_weights)
    return unit


class SafetensorsFolder:
    """The weights of an HF checkpoint folder, read by name and slice. Nothing else than safetensors is opened."""

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if index.is_file():
            self._files = _read_index(index)
        elif single.is_file():
            with _opened(single) as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise ConfigError(
                f"model.checkpoint={path}: no model.safetensors there; echelon reads safetensors only, never pickled "
                "weights: convert the checkpoint with `model.save_pretrained(...)` first."
            )

    def find(self, name: str, base_prefix: str) -> str | None:
        """The name a parameter has in the files: its own, or without the backbone's prefix (GPT-2 on the hub)."""
        bare = name.removeprefix(base_prefix + ".")
        return next((candidate for candidate in (name, bare) if candidate in self._files), None)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """One slice of one tensor; only its bytes are read. Raises CheckpointError, as everything that reads here."""
        with _opened(self._files[name]) as file:
            tensor: Tensor = file.get_slice(name)[slices]
            return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        with _opened(self._files[name]) as file:
            whole = file.get_slice(name)
            if whole.get_dtype() not in _FLOATING:
                raise CheckpointError(
                    f"{self._files[name]}: {name} is stored as {whole.get_dtype()}, and weights are read as "
                    f"{', '.join(_FLOATING)}; convert the checkpoint, or get the file again if it is damaged."
                )
            return tuple(whole.get_shape())


def _read_index(path: Path) -> dict[str, Path]:
    """The file of each tensor, all in the folder of the index."""
    try:
        files = {name: path.parent / file for name, file in read_json(path)["weight_map"].items()}
        for file in files.values():
            if file.parent != path.parent or file.suffix != ".safetensors" or not file.is_file():
                raise ValueError(f"it names {str(file)[:200]!r}, which is no safetensors file beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); get the file again.") from error
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} cannot be read ({str(error).strip()[:300]}); get the file again.") from error


@torch.no_grad()
def load_pretrained(model: PreTrainedModel, skeleton: PreTrainedModel, path: Path) -> None:
    """Read each rank's slice of an HF checkpoint folder into a materialised model, and rebuild its buffers.

    Raises:
        CheckpointError: a parameter of the model is missing there or has another shape.
    """
    files = SafetensorsFolder(path)
    tied = _names_by_parameter(model)
    for names in tied.values():
        found = [match for name in names if (match := files.find(name, model.base_model_prefix)) is not None]
        if not found:
            raise CheckpointError(
                f"model.checkpoint={path}: it has no weight {names[0]}; the files are not this model's."
            )
        target = model.get_parameter(names[0])
        if files.shape(found[0]) != tuple(target.shape):
            raise CheckpointError(
                f"model.checkpoint={path}: {names[0]} has shape {files.shape(found[0])} there and "
                f"{tuple(target.shape)} in config.json; the folder's files do not belong together."
            )
        local_part(target).copy_(files.read(found[0], local_slices(target)))
    initialize_buffers(model, skeleton)


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
