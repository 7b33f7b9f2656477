"""Exports a run as an HF folder that `transformers` loads, with bounded memory, and verifies the written weights."""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from echelon.ground.checksums import MANIFEST, list_files
from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.stored import read_bytes, read_json, write_json
from echelon.learn.checkpoint.adapted import AdaptedRun, read_run_recipe, run_skeleton
from echelon.learn.checkpoint.adapter_folder import write_adapter
from echelon.learn.checkpoint.fill import load_alone, read_metadata
from echelon.learn.checkpoint.folder import check_empty, checkpoint_of
from echelon.learn.checkpoint.model_card import render_card
from echelon.learn.checkpoint.out_folder import check_weights, writing_explained, written_folder
from echelon.learn.model.build import persistent_buffers
from echelon.learn.model.conversion import Conversion, conversions_to_files
from echelon.learn.model.model_folder import run_model_dir

SHARD_BYTES = 4 * 2**30
TRAINING = "echelon.json"
"""File of an exported folder with the training settings that `echelon eval` uses."""

_CPU = torch.device("cpu")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_run(
    run: Path,
    out: Path,
    dtype: str = "fp32",
    which: str | None = None,
    device: torch.device = _CPU,
    check: Callable[[Path], object] = lambda writing: None,
) -> Path:
    """Write a checkpoint of a run (see `checkpoint_of`) as an HF folder: config, safetensors, tokenizer, model card.

    An adapter is merged into the weights that it was trained with, for `qlora` the dequantised ones.

    Whatever the model's size, this needs memory for a weight file (4 GiB, or the experts of one layer) and the fp32
    weights that it is made of. The folder is created atomically.

    Args:
        device: where an adapter is merged, one module after another.
        check: is given the complete folder before it gets its name, and may add to it; if it raises, nothing is left.

    Raises:
        ConfigError: `out` exists and is not empty, or another process writes it, or the dtype is unknown.
        CheckpointError: the checkpoint is damaged or lacks a weight, or the folder cannot be written.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}.")
    check_empty(out)
    checkpoint = checkpoint_of(run, which)
    skeleton = run_skeleton(run)
    with written_folder(out) as writing:
        if read_run_recipe(run).adapter.is_adapter:
            read: Reader = AdaptedRun(run, which, device).merged
        else:
            check_complete(checkpoint.path, skeleton)
            read = partial(_load_tensors, checkpoint.path, skeleton)
        with writing_explained(out):
            write_weights(read, skeleton, writing, dtype)
            _write_sidecars(run_model_dir(run), writing, dtype)
            write_json(writing / TRAINING, {"sequence_len": read_run_recipe(run).data.sequence_len})
            card = render_card(run, checkpoint.step, dtype=read_json(writing / "config.json")["dtype"])
            (writing / "README.md").write_text(card, encoding="utf-8")
        check(writing)
    return out.absolute()


def export_adapter(run: Path, out: Path, which: str | None = None) -> int:
    """Write the adapter of a run's checkpoint in PEFT's format; return the size of its weights in bytes.

    Raises the errors of `export_run`.
    """
    check_empty(out)
    content = AdaptedRun(run, which, _CPU).describe()
    card = render_card(run, checkpoint_of(run, which).step, is_adapter=True)
    base = read_run_recipe(run).model.checkpoint
    return write_adapter(out, content, base, run_model_dir(run), card, replace=False)


Reader = Callable[[list[str]], dict[str, Tensor]]


def write_weights(read: Reader, skeleton: PreTrainedModel, out: Path | None, dtype: str, verifies: bool = True) -> None:
    """Write the weights under the names, and in the shapes, that checkpoints of the family have on the hub.

    Args:
        read: the model's weights of these names.
        out: None: only call `read` as where they are written, if it is collective.
        verifies: whether each file is read back and compared.
    """
    stored, buffers = DTYPES[dtype], persistent_buffers(skeleton)
    groups = list(_file_groups(skeleton, stored))
    weight_map: dict[str, str] = {}
    total_size = 0
    for index, conversions in enumerate(groups, start=1):
        single = len(groups) == 1
        file = "model.safetensors" if single else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        live = read([name for conversion in conversions for name in conversion.sources])
        if out is None:
            continue
        tensors: dict[str, Tensor] = {}
        for conversion in conversions:
            taken = {name: live.pop(name) for name in conversion.sources}
            kept = not buffers.keys().isdisjoint(taken)  # a buffer keeps its dtype: some steer which expert is chosen
            tensors |= {
                name: (tensor if kept else tensor.to(stored)).contiguous()
                for name, tensor in conversion.convert(taken).items()
            }
        save_file(tensors, out / file, metadata={"format": "pt"})
        if verifies:
            check_weights(out / file, tensors, "written")
        (out / file).chmod(out.stat().st_mode & 0o666)  # safetensors writes files readable by the owner only
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if len(groups) > 1 and out is not None:
        index_text = json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2)
        (out / "model.safetensors.index.json").write_text(index_text)


def _file_groups(skeleton: PreTrainedModel, dtype: torch.dtype) -> Iterator[list[Conversion]]:
    """What each file is made of; what is converted together stays together."""
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(skeleton).items()}
    group: list[Conversion] = []
    size = 0
    for conversion in conversions_to_files(skeleton, shapes):
        nbytes = sum(math.prod(shape) for shape in conversion.targets.values()) * dtype.itemsize
        if group and size + nbytes > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(conversion)
        size += nbytes
    yield group


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint has of a model that was trained whole, by name."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def _load_tensors(checkpoint: Path, skeleton: PreTrainedModel, names: list[str]) -> dict[str, Tensor]:
    stored = stored_tensors(skeleton)
    tensors = {f"model.{name}": torch.empty_like(stored[name], device="cpu") for name in names}
    load_alone(checkpoint, tensors)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def check_complete(checkpoint: Path, skeleton: PreTrainedModel) -> None:
    """Raise CheckpointError if a checkpoint lacks a weight of the model."""
    saved = {
        name.removeprefix("model.")
        for name in read_metadata(checkpoint).state_dict_metadata
        if name.startswith("model.")
    }
    needed = stored_tensors(skeleton).keys()
    if not needed <= saved:
        raise CheckpointError(f"Checkpoint {checkpoint} lacks {sorted(needed - saved)[0]} of the run's model.")


def _write_sidecars(model_dir: Path, out: Path, dtype: str) -> None:
    """Copy config and tokenizer; set the config's dtype to that of the written weights."""
    for path in list_files(model_dir):
        if path.name == MANIFEST:
            continue
        text = read_bytes(path)
        if path.name == "config.json":
            config = json.loads(text)
            config["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
            text = json.dumps(config, indent=2).encode()
        (out / path.name).write_bytes(text)
