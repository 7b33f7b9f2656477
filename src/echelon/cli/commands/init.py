"""Commands that write a recipe: `echelon init`, a commented one to start from, or the JSON schema; and
`echelon import`, which converts the configuration of another training tool."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.commands.terminal import log_to_stderr, show, show_piece
from echelon.ground.errors import ConfigError

logger = logging.getLogger(__name__)


def init(
    path: Annotated[Path, typer.Argument(metavar="[RECIPE]")] = Path("recipe.yaml"),
    *,
    params: Annotated[str | None, typer.Option(metavar="1.3b")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="50b")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=257)] = None,
    schema: bool = False,
) -> None:
    """Write a recipe to start from. By default a small one; or one for a number of parameters and tokens.

    Args:
        path: the file to write.
        params: number of parameters; determines shape, batch and schedule.
        tokens: tokens to train on. Default: 20 per parameter.
        vocab_size: vocabulary size, with `params` or `tokens`.
        schema: print the JSON schema of recipes, for editors.
    """
    if schema:
        from echelon.recipe.render import recipe_json_schema

        return show(json.dumps(recipe_json_schema(), indent=2))
    from echelon.recipe.render import render_starter

    if path.exists():
        raise ConfigError(f"{path} already exists; give another file, or remove it.")
    if params is None and tokens is None:
        if vocab_size is not None:
            raise ConfigError(f"--vocab-size {vocab_size} requires --params or --tokens; add one of them.")
        recipe, lines = render_starter(name=path.stem, file=str(path)), list[str]()
    else:
        from echelon.planner.scaled_recipe import parse_count, render_scaled, scale_recipe

        scaled = scale_recipe(
            None if params is None else parse_count("--params", params),
            None if tokens is None else parse_count("--tokens", tokens),
            vocab_size,
        )
        recipe, lines = render_scaled(scaled, path.stem, str(path)), [*map(str, scaled.choices), *scaled.notes]
    path.write_text(recipe, encoding="utf-8")
    for line in lines:
        logger.info(line)
    logger.info(f"wrote {path}: set data.train to your text, then run: echelon train {path}")
    return None


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
