"""`echelon prepare`: prepare the data as shards, ahead of training; and what a teacher predicts for it."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.commands.arguments import NprocOption, OverridesArgument, RecipeArgument, parse_nproc, read_recipe

if TYPE_CHECKING:
    from echelon.recipe import Recipe

logger = logging.getLogger(__name__)

_TOP_K = 64
TeacherOption = Annotated[
    str | None,
    typer.Option("--teacher", metavar="MODEL", help="Also prepare the predictions of this teacher, for distillation."),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k", metavar="K", help=f"Tokens of the teacher for each target. Default: the recipe's, or {_TOP_K}."
    ),
]


def prepare(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    teacher: TeacherOption = None,
    top_k: TopKOption = None,
    nproc: NprocOption = "auto",
) -> None:
    """Read, tokenize and pack the data into shards. `train` does this if they are missing.

    With a teacher (--teacher, or objective.top_k in the recipe), also write the likeliest tokens that it predicts for
    every target, and their log-probabilities. --nproc processes of this machine divide this work; so do machines that
    share the folder, if each runs the command.
    """
    from echelon.learn.data.prepare import prepare_data

    count = parse_nproc(nproc)
    recipe = _with_teacher(recipe_path, overrides or [], teacher, top_k)
    data = prepare_data(recipe)
    logger.info(f"data: prepared in {data.path}")
    if recipe.objective.top_k is not None:
        from echelon.learn.teaching import prepare_teacher

        prepare_teacher(recipe, data, count)


def _with_teacher(path: Path, overrides: list[str], teacher: str | None, top_k: int | None) -> "Recipe":
    """Read the recipe, with the teacher that the options name, if any. Raises ConfigError."""
    recipe = read_recipe(path, overrides)
    if teacher is None and top_k is None:
        return recipe
    given = recipe.objective if recipe.objective.name == "distill" else None
    section = {
        "name": "distill",
        "teacher": teacher or (given and given.teacher),
        "top_k": top_k or (given and given.top_k) or _TOP_K,
        "temperature": given.temperature if given else 1.0,
    }
    return read_recipe(path, [*overrides, f"objective={json.dumps(section)}"], quiet=True)
