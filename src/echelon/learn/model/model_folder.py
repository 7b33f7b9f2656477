"""Folders of a model that `transformers` reads: the config and tokenizer of a run, and weights in any format."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.checksums import check_files, write_manifest
from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.run_files import RunFiles, is_run
from echelon.ground.stored import read_json
from echelon.learn.model.hub import HubModel, Part, fetch, is_hub_name
from echelon.learn.model.safetensors_folder import SafetensorsFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def write_model_folder(
    folder: Path, config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase", stops: Sequence[int]
) -> None:
    """Write config.json and the tokenizer's files into a run's `model/`, with a manifest. Weights are added at export.

    `stops`: the token ids that end a trained response. They go to generation_config.json as `eos_token_id`, so that
    `generate` of transformers stops there.
    """
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else getattr(config, "pad_token_id", None)
    bos, eos = getattr(config, "bos_token_id", None), find_stops(config, stops) or None
    GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad).save_pretrained(folder)
    write_manifest(folder)


def find_stops(config: "PretrainedConfig", learned: Sequence[int]) -> list[int]:
    """Return the ids that stop generation: those that the model was trained to end with, else the config's own."""
    eos = getattr(config, "eos_token_id", None)
    return list(learned) or ([] if eos is None else eos if isinstance(eos, list) else [eos])


def find_model_dir(source: str) -> str:
    """Return the source of config and tokenizer of `model.checkpoint`: a run's `model/`, else the source itself.

    Raises:
        CheckpointError: the files of the run do not match their checksums.
    """
    return str(run_model_dir(Path(source))) if is_run(Path(source)) else source


def find_config_folder(source: str, trust_remote_code: bool = False) -> Path:
    """Return the folder with the config.json of `model.checkpoint`. Raises like `load_config`."""
    folder = Path(find_model_dir(source))
    if is_hub_name(source):
        folder = fetch(HubModel(source, "model.checkpoint", Part.CONFIG, trust_remote_code))
    elif not folder.is_dir():
        raise ConfigError(
            f"model.checkpoint={source}: there is no such folder (current folder: {Path.cwd()}); give a folder with "
            "config.json and safetensors, or a hub id."
        )
    return folder


def run_model_dir(run: Path) -> Path:
    """Return a run's `model/` after verifying its checksums. Raises CheckpointError."""
    folder = RunFiles(run).model_dir
    try:
        check_files(folder, checksums=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"The config or the tokenizer of the run is damaged: {error} Resume the training, which rewrites them, or "
            "restore the folder from a backup."
        ) from error
    return folder


def open_folder(path: Path) -> SafetensorsFolder:
    """Open the weights of an HF folder as plain numbers. Raises ConfigError or CheckpointError if they cannot be."""
    from echelon.learn.model.stored_format import find_stored_format

    try:
        fields = read_json(path / "config.json")
    except FileNotFoundError:
        return SafetensorsFolder(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'} cannot be read ({error}); copy the file again.") from error
    stored = find_stored_format(str(path), fields) if isinstance(fields, dict) else None
    if stored is None:
        return SafetensorsFolder(path)
    from echelon.learn.model.dequantized import DequantizedFolder  # the others need no torch

    return DequantizedFolder(path, stored)
