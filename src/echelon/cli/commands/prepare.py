"""`echelon prepare`: prepare the data as shards, ahead of training."""

import logging

from echelon.cli.commands.arguments import OverridesArgument, RecipeArgument, read_recipe

logger = logging.getLogger(__name__)


def prepare(recipe_path: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Read, tokenize and pack the data into shards. `train` does this if they are missing."""
    from echelon.learn.data.prepare import prepare_data

    recipe = read_recipe(recipe_path, overrides)
    data = prepare_data(recipe)
    logger.info(f"data: prepared in {data.path}")
