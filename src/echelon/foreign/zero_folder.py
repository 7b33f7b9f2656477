"""Converts a checkpoint that DeepSpeed wrote, of ZeRO stage 1, 2 or 3 or its universal format, to safetensors.

Its files are pickles. They are read with `torch.load(weights_only=True)`, which admits tensors and plain values only.
The classes of DeepSpeed that they also contain are replaced by empty ones: nothing of DeepSpeed is imported. torch does
not compare the checksums in such a file with its content, so this is done before.
"""

import math
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from echelon.ground.errors import CheckpointError, ConfigError, first_line
from echelon.ground.stored import open_regular
from echelon.learn.checkpoint.export import stored_tensors, write_weights
from echelon.learn.checkpoint.folder import check_empty
from echelon.learn.model.build import build_on_meta, load_config

_FOLDER_BIT = 0x10
_MODEL, _OPTIMIZER = "*_model_states.pt", "*_optim_states.pt"


class _Left:
    """In place of a class of DeepSpeed whose values are not needed."""

    def __init__(self, *_: Any) -> None:
        """Any arguments."""


class _ZeroStage(int):
    """In place of DeepSpeed's enumeration of stages."""


_ADMITTED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Left, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Left, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Left, "deepspeed.utils.tensor_fragment.fragment_address"),
]


@dataclass(frozen=True)
class ZeroWeights:
    """The weights in a folder.

    Attributes:
        tensors: the trained weights in fp32, frozen ones and buffers as stored, by name. Tied weights are there once.
        described: a noun phrase for a message.
    """

    tensors: dict[str, Tensor]
    described: str


def is_zero_folder(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint of DeepSpeed, or like one that contains several and names the latest."""
    return _find_step(folder) is not None


def read_zero_folder(folder: Path) -> ZeroWeights:
    """Read all weights into memory.

    Raises CheckpointError for a folder that is damaged, has anything but tensors and plain values, or is of tensor or
    pipeline parallelism.
    """
    if (step := _find_step(folder)) is None:
        raise CheckpointError(f"{folder} has no *_model_states.pt of DeepSpeed, neither there nor where `latest` says.")
    paths = _sorted(step, _MODEL)
    models = [_load_mapping(path) for path in paths]
    first = models[0]
    if first.get("mp_world_size", 1) != 1 or any("mp_rank_00" not in path.name for path in paths):
        raise CheckpointError(f"{step} is of tensor or pipeline parallelism, and only ZeRO's checkpoints can be read.")
    try:
        tensors = {name: tensor.detach().clone() for name, tensor in _read_kept(models, first)}
        if (step / "zero").is_dir():
            described = "a universal checkpoint of DeepSpeed"
            trained = _read_universal(step / "zero", _shapes(first))
        else:
            states = [_load_mapping(path)["optimizer_state_dict"] for path in _sorted(step, _OPTIMIZER)]
            _check_count(step, states)
            stage = int(states[0]["zero_stage"])
            described = f"a checkpoint of DeepSpeed: ZeRO stage {stage}, {len(states)} processes"
            trained = (
                _read_divided(states, first["param_shapes"]) if stage < 3 else _read_sharded(states, _shapes(first))
            )
        tensors |= {name: tensor.detach().float().clone() for name, tensor in trained}
    except CheckpointError:
        raise
    except Exception as error:  # values of any type may be anywhere
        raise CheckpointError(
            f"{step} is damaged, or of a version of DeepSpeed that echelon does not know: {error!r}"
        ) from error
    return ZeroWeights(tensors, described)


def _find_step(folder: Path) -> Path | None:
    """The folder with the files of one step."""
    for name in ("latest", "latest_universal"):
        if (folder / name).is_file() and (folder / name).stat().st_size < 4096:
            tag = (folder / name).read_text(encoding="utf-8", errors="replace").strip()
            if re.fullmatch(r"[\w.-]+", tag) and any((folder / tag).glob(_MODEL)):
                return folder / tag
    return folder if any(folder.glob(_MODEL)) else None


def _sorted(step: Path, pattern: str) -> list[Path]:
    """The files of a kind, by the rank in their names."""
    files = sorted(step.glob(pattern), key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)])
    if not files:
        raise CheckpointError(f"{step} has no {pattern}; the checkpoint is not complete.")
    return files


def _load_mapping(path: Path) -> Mapping[str, Any]:
    """A file whose content is a dictionary. Raises CheckpointError for anything else."""
    content = _load(path)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} is damaged, or not of DeepSpeed: it contains a value of type {type(content).__name__} instead of "
            "a dictionary."
        )
    return content


def _check_records(path: Path) -> None:
    """Compare each record of a file of `torch.save` with its checksum. Raises CheckpointError for a damaged file."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            strange = [info.filename for info in archive.infolist() if not _is_plain(info)]
            damaged = strange[0] if strange else archive.testzip()
    except Exception as error:  # zipfile raises many types on a damaged file
        raise CheckpointError(
            f"{path} is damaged, or not a file of torch.save: {first_line(error)}; copy the checkpoint again."
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: its record {damaged} is not as written; copy the checkpoint again.")


def _is_plain(record: zipfile.ZipInfo) -> bool:
    """Whether a record is stored as torch stores it: as it is. Of one marked as a folder, torch reads nothing."""
    is_folder = record.filename.endswith("/") or record.external_attr & _FOLDER_BIT
    return record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size and not is_folder


def _load(path: Path) -> Any:
    _check_records(path)
    try:
        with safe_globals(_ADMITTED):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types on a strange pickle
        raise CheckpointError(
            f"{path} cannot be read without running code in it: {first_line(error)} If you trust it, convert it "
            "with DeepSpeed's zero_to_fp32.py CHECKPOINT OUT --safe_serialization; OUT is then a model.checkpoint."
        ) from error


def _shapes(model: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {name: shape for group in model["param_shapes"] for name, shape in group.items()}


def _read_kept(models: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Buffers and frozen weights."""
    yield from ((name, first["module"][name]) for name in first["buffer_names"])
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        whole = parts[0] if parts[0].numel() == shape.numel() else torch.cat(parts)
        yield name, whole[: shape.numel()].view(shape)


def _read_universal(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        if "/" in name or name.startswith("."):
            raise CheckpointError(f"{folder.parent} names a weight {name!r}, which is not a file's name.")
        content = _load(folder / name / "fp32.pt")
        yield name, (content["param"] if isinstance(content, dict) else content).view(shape)


def _read_divided(
    states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, torch.Size]]
) -> Iterator[tuple[str, Tensor]]:
    """Stages 1 and 2: the weights of a parameter group lie one after the other, divided among the ranks."""
    gaps = states[0].get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    for number, (group, after) in enumerate(zip(groups, gaps, strict=True)):
        flat = torch.cat([state["single_partition_of_fp32_groups"][number] for state in states])
        start = 0
        for (name, shape), gap in zip(group.items(), after, strict=True):
            yield name, flat[start : start + shape.numel()].view(shape)
            start += shape.numel() + gap
        if not 0 <= flat.numel() - start < 4 * len(states):
            raise ValueError(f"parameter group {number} has {flat.numel()} values, and its weights are {start}")


def _read_sharded(
    states: Sequence[Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """Stage 3: every rank has an equal part of each weight; the last one's ends with padding."""
    flats = [torch.cat(list(state["fp32_flat_groups"])) for state in states]
    start = 0
    for name, shape in shapes.items():
        size = math.ceil(shape.numel() / len(states))
        yield name, torch.cat([flat[start : start + size] for flat in flats])[: shape.numel()].view(shape)
        start += size
    if any(flat.numel() != start for flat in flats):
        raise ValueError(f"the ranks have {[flat.numel() for flat in flats]} values, and their parts are {start}")


def _check_count(step: Path, states: Sequence[Mapping[str, Any]]) -> None:
    counts = states[0]["partition_count"]
    count = max(counts) if isinstance(counts, list) else counts
    if count != len(states):
        raise CheckpointError(
            f"{step} is of {count} processes, and has the files of {len(states)}; copy the checkpoint again."
        )


_BESIDE = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def import_zero_folder(folder: Path, out: Path) -> str:
    """Write the fp32 weights of a checkpoint to `out`, with the config and the tokenizer that lie beside it.

    These are in the folder itself, or in the one that contains it, where Hugging Face's Trainer writes them.

    Returns: a description of the checkpoint.

    Raises:
        ConfigError: there is no config.json, or `out` is not empty.
        CheckpointError: the checkpoint cannot be read safely, or is not of the config's model.
    """
    beside = next((base for base in (folder, folder.resolve().parent) if (base / "config.json").is_file()), None)
    if beside is None:
        raise ConfigError(
            f"{folder} has no config.json, nor has the folder that contains it; copy the model's config.json there."
        )
    check_empty(out)
    skeleton = build_on_meta(load_config(str(beside)))
    weights = read_zero_folder(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(skeleton).items()}
    for name, shape in shapes.items():
        weight = weights.tensors.get(name)
        if weight is None or tuple(weight.shape) != shape:
            state = "no such weight" if weight is None else f"shape {tuple(weight.shape)}"
            raise CheckpointError(
                f"{folder} is not of the model in {beside / 'config.json'}: {name} has shape {shape} there, and the "
                f"checkpoint has {state}."
            )
    out.mkdir(parents=True, exist_ok=True)
    write_weights(lambda names: {name: weights.tensors[name] for name in names}, skeleton, out, "fp32")
    for path in (path for pattern in _BESIDE for path in beside.glob(pattern)):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    return weights.described
