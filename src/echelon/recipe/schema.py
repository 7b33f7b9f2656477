"""The JSON schema of a recipe, by which editors complete and check one."""

from typing import Any

from echelon.recipe.document import Recipe


def recipe_json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe file, with every key's description; other tools' spellings left out.

    For editors: `# yaml-language-server: $schema=recipe.schema.json` as the first line of a recipe.
    """
    schema = Recipe.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "echelon recipe"}
