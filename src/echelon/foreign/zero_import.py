"""Converts a checkpoint of DeepSpeed to a folder of safetensors, which `model.checkpoint` takes."""

import shutil
from pathlib import Path

from echelon.foreign.zero_folder import read_zero_folder
from echelon.ground.errors import CheckpointError, ConfigError
from echelon.learn.checkpoint.export import stored_tensors, write_weights
from echelon.learn.checkpoint.folder import check_empty
from echelon.learn.model.build import build_on_meta, load_config

_BESIDE = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def import_zero_folder(folder: Path, out: Path) -> str:
    """Write the fp32 weights of a checkpoint to `out`, with the config and the tokenizer that lie beside it.

    These are in the folder itself, or in the one that contains it, where Hugging Face's Trainer writes them.

    Returns: a description of the checkpoint.

    Raises:
        ConfigError: there is no config.json, or `out` is not empty.
        CheckpointError: the checkpoint cannot be read safely, or is not of the config's model.
    """
    beside = next((place for place in (folder, folder.resolve().parent) if (place / "config.json").is_file()), None)
    if beside is None:
        raise ConfigError(
            f"{folder} has no config.json, nor has the folder that contains it; copy the model's config.json there."
        )
    check_empty(out)
    skeleton = build_on_meta(load_config(str(beside)))
    weights = read_zero_folder(folder)
    wanted = {name: tuple(tensor.shape) for name, tensor in stored_tensors(skeleton).items()}
    for name, shape in wanted.items():
        found = weights.tensors.get(name)
        if found is None or tuple(found.shape) != shape:
            state = "no such weight" if found is None else f"shape {tuple(found.shape)}"
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
