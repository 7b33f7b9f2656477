"""`echelon import`: convert a configuration file of another training tool into a recipe."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from echelon.commands.terminal import log_to_stderr, show
from echelon.errors import ConfigError

logger = logging.getLogger(__name__)


def import_file(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file of Axolotl, HF (TRL, PEFT) or LLaMA-Factory.")],
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="The recipe to write. Default: stdout.")] = None,
    tool: Annotated[
        str | None,
        typer.Option("--from", metavar="TOOL", help="axolotl, hf, llamafactory or llamafactory-v1. Default: detected."),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer", metavar="sft|dpo|transformers", help="For HF files: the trainer that the file is for."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, metavar="N", help="Number of GPUs the file was used with; sets the global batch."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, metavar="N", help="Number of training sequences; converts fractions to steps."
        ),
    ] = None,
) -> None:
    """Convert another tool's configuration into a recipe. Lists all keys that could not be converted."""
    from echelon.recipe.foreign import Amounts, import_recipe

    if out is not None and out.exists():
        raise ConfigError(f"{out} already exists; give another file, or remove it.")
    log_to_stderr()
    imported = import_recipe(path, tool, Amounts(devices, samples), trainer)
    logger.info(f"import: {path} is read as a file for {imported.tool}")
    for note in imported.notes:
        logger.warning(note)
    if out is None:
        typer.echo(imported.text, nl=False)
    else:
        out.write_text(imported.text, encoding="utf-8")
        show(f"wrote {out}; check it with: echelon plan {out}")
