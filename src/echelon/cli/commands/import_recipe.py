"""`echelon import`: convert another training tool's configuration into a recipe, or its checkpoint into weights."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.commands.terminal import log_to_stderr, show, show_piece
from echelon.ground.errors import ConfigError

logger = logging.getLogger(__name__)


def import_recipe(
    path: Annotated[Path, typer.Argument(metavar="FILE")],
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]")] = None,
    *,
    tool: Annotated[str | None, typer.Option("--from", metavar="TOOL")] = None,
    trainer: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    devices: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
) -> None:
    """Convert another tool's configuration into a recipe. Lists all keys that could not be converted.

    A checkpoint folder of DeepSpeed becomes a folder of safetensors instead.

    Args:
        path: a file of Axolotl, HF (TRL, PEFT), LLaMA-Factory or ms-swift; or a folder of DeepSpeed.
        out: the recipe to write. Default: stdout. For a checkpoint: a new folder.
        tool: the tool, such as hf or axolotl; an unknown one lists them all. Default: detected.
        trainer: for HF files: the trainer that the file is for, such as sft or dpo; an unknown one lists them all.
        devices: number of GPUs the file was used with; sets the global batch.
        samples: number of training sequences; converts fractions to steps.
    """
    from echelon.foreign.importers import Amounts
    from echelon.foreign.importers import import_recipe as convert

    if path.is_dir():
        _import_checkpoint(path, out)
        return
    if out is not None and out.exists():
        raise ConfigError(f"{out} already exists; give another file, or remove it.")
    log_to_stderr()
    imported = convert(path, tool, Amounts(devices, samples), trainer)
    logger.info(f"import: {path} is read as a file for {imported.tool}")
    for note in imported.notes:
        logger.warning(note)
    if out is None:
        show_piece(imported.text)
    else:
        out.write_text(imported.text, encoding="utf-8")
        show(f"wrote {out}; check it with: echelon plan {out}")


def _import_checkpoint(path: Path, out: Path | None) -> None:
    from echelon.foreign.zero_folder import import_zero_folder, is_zero_folder

    if not is_zero_folder(path):
        raise ConfigError(
            f"{path} is a folder, and not a checkpoint of DeepSpeed (*_model_states.pt, or `latest`); give a "
            "configuration file, or such a folder."
        )
    if out is None:
        raise ConfigError(
            f"{path} is a checkpoint of DeepSpeed; name the folder to write too: echelon import {path} OUT"
        )
    log_to_stderr()
    described = import_zero_folder(path, out)
    logger.info(f"import: {path} is {described}")
    show(f"wrote {out}; train it further with model.checkpoint={out}")
