"""`echelon init`: write a recipe to start from; or the JSON schema of recipes."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.commands.terminal import show
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
    from echelon.recipe.starter import render_starter

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
