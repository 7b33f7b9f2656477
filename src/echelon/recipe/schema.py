"""The JSON schema of a recipe, with which editors complete and check recipes."""

from typing import Any

from echelon.recipe.document import Recipe


def recipe_json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe file, with descriptions, without spellings of other tools.

    For editors: `# yaml-language-server: $schema=recipe.schema.json` as the first line of a recipe.
    """
    schema = Recipe.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "echelon recipe"}
