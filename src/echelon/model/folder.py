"""The config and tokenizer of a run's model, as files that `transformers` reads."""

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import CheckpointError
from echelon.manifest import check_files, write_manifest
from echelon.run_folder import RunFolder, is_run

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def write_model_folder(folder: Path, config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write config.json and the tokenizer's files into a run's `model/`, with a manifest; weights join at export."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    write_manifest(folder)


def find_model_dir(source: str) -> str:
    """Where the config and the tokenizer of `model.checkpoint` stand: in a run's `model/`, else the source itself.

    Raises:
        CheckpointError: those of the run are not as they were written.
    """
    return str(run_model_dir(Path(source))) if is_run(Path(source)) else source


def run_model_dir(run: Path) -> Path:
    """A run's `model/`, compared with its checksums. Raises CheckpointError."""
    folder = RunFolder(run).model_dir
    try:
        check_files(folder, checksums=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"The config or the tokenizer of the run is damaged: {error} Training writes them anew when it goes on; a "
            "copy of this folder from before does as well."
        ) from error
    return folder
