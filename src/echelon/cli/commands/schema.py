"""`echelon schema`: print the recipe's JSON schema."""

import json

from echelon.cli.commands.terminal import show


def schema() -> None:
    """Print the recipe's JSON schema, for editors."""
    from echelon.recipe.render import recipe_json_schema

    show(json.dumps(recipe_json_schema(), indent=2))
