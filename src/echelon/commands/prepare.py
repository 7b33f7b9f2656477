"""`echelon prepare`: the data into shards, ahead of training."""

from echelon.commands.arguments import OverridesArgument, RecipeArgument, read_recipe
from echelon.commands.terminal import say
from echelon.stopping import stops_told


def prepare(recipe_path: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Read, tokenize and pack the data into shards; `train` does this if they are missing."""
    from echelon.data.prepare import prepare_data

    recipe = read_recipe(recipe_path, overrides)
    with stops_told():
        data = prepare_data(recipe, say)
    say(f"data: prepared in {data.path}")
