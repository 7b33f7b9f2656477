"""Opens the weights of an HF folder in the format that its config.json names. Does not import torch for plain ones."""

from pathlib import Path

from echelon.ground.errors import CheckpointError
from echelon.ground.stored import read_json
from echelon.learn.model.safetensors_folder import SafetensorsFolder
from echelon.learn.model.stored_format import find_stored_format


def open_folder(path: Path) -> SafetensorsFolder:
    """Open the weights of an HF folder, as plain numbers whatever the format that its config.json names.

    Raises:
        ConfigError: there are no safetensors files, or they have a format that echelon does not read.
        CheckpointError: a tensor of a quantized weight is missing, or does not fit the others.
    """
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
