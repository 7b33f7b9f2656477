"""Recipes from Python: of a file, of a mapping, with other values for some keys."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.recipe import Overrides, Recipe, build_recipe, check_built
from echelon.recipe import load_recipe as load_recipe_file
from echelon.recipe.render import recipe_mapping
from echelon.redaction import redact_text

RecipeLike = Recipe | str | Path | Mapping[str, Any]
"""A recipe, the path of its file, or the mapping that such a file holds."""

_ORIGIN = "overrides"


def load_recipe(recipe: RecipeLike, overrides: Overrides = ()) -> Recipe:
    """The recipe of a YAML file, or of the mapping that such a file would hold, checked and with every default.

    What a key was taken for, where it has another tool's spelling, is a warning.

    Args:
        recipe: a path, or a mapping. A Recipe is returned as it is, when there are no overrides.
        overrides: keys that win over the file: `{"train.steps": 50}`, or `["train.steps=50"]`.

    Raises:
        ConfigError: naming the key, its value and what to change.
    """
    if isinstance(recipe, Recipe):
        check_built(recipe)
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
