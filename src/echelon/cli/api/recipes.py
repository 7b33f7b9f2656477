"""Load recipes in Python, from a file or a mapping, with overrides."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.ground.redaction import redact_text
from echelon.recipe.document import Recipe
from echelon.recipe.load import Overrides, build_recipe
from echelon.recipe.load import load_recipe as load_recipe_file
from echelon.recipe.render import recipe_mapping

RecipeLike = Recipe | str | Path | Mapping[str, Any]
"""A recipe, the path of its file, or a mapping with the content of such a file."""

_ORIGIN = "overrides"


def load_recipe(recipe: RecipeLike, overrides: Overrides = ()) -> Recipe:
    """Load and check the recipe of a YAML file or of an equivalent mapping, with all defaults filled in.

    A warning reports each key in another tool's spelling and the key it was read as.

    Args:
        recipe: a path or a mapping. A Recipe is returned unchanged if there are no overrides.
        overrides: keys that win over the file: `{"train.steps": 50}`, or `["train.steps=50"]`.

    Raises:
        ConfigError: a key is invalid; the message names the key, its value and the fix.
    """
    if isinstance(recipe, Recipe):
        if not overrides:
            return recipe
        recipe = recipe_mapping(recipe)
    if isinstance(recipe, str | Path):
        loaded, notes = load_recipe_file(Path(recipe), overrides, _ORIGIN)
    else:
        loaded, notes = build_recipe(recipe, overrides, _ORIGIN)
    for note in notes:
        warnings.warn(redact_text(note), stacklevel=2)
    return loaded
