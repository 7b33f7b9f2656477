"""Recipes as text: the recipe that `echelon init` writes, a recipe without secrets, its JSON schema."""

import shlex
from pathlib import Path
from typing import Any

from echelon.ground.redaction import find_secrets, redact
from echelon.ground.stored import read_text
from echelon.recipe.document import Recipe
from echelon.recipe.keys import dotted
from echelon.recipe.section import Section
from echelon.recipe.yaml_text import render_inline, render_yaml


def render_recipe(recipe: Recipe, hide_secrets: bool = True) -> str:
    """Return the recipe as YAML, including defaults. `load_recipe` reads it as an equal Recipe, except for redacted
    secrets."""
    mapping = recipe_mapping(recipe)
    return render_yaml(redact(mapping) if hide_secrets else mapping)


def recipe_mapping(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain values, by the keys of a file. Unset keys whose default is null are omitted."""
    return _plain_section(recipe)


def find_secret_keys(recipe: Recipe) -> list[str]:
    """Return the dotted keys whose value, or a part of it, `render_recipe` redacts."""
    return [dotted(path) for path in find_secrets(recipe_mapping(recipe))]


def _plain_section(section: Section) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value is not None or field.default is not None:
            plain[field.alias or name] = plain_value(value)
    plain.update(plain_value(section.model_extra or {}))
    return plain


def plain_value(value: Any) -> Any:
    """Return a value of a recipe as plain mappings, lists, strings and numbers."""
    if isinstance(value, Section):
        return _plain_section(value)
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def recipe_json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe file, with descriptions, without spellings of other tools.

    For editors: `# yaml-language-server: $schema=recipe.schema.json` as the first line of a recipe.
    """
    schema = Recipe.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "echelon recipe"}


def render_starter(name: str = "my-run", text_path: str = "text.txt", file: str = "recipe.yaml") -> str:
    """Return the YAML of a recipe that trains a small Llama from scratch on `text_path`, with comments.

    `file`: the path of the recipe, which its first lines name in commands.
    """
    named, read_from = f"  name: {render_inline(name)} ", f"    - path: {render_inline(text_path)} "
    text = read_text(Path(__file__).with_name("starter.yaml"))
    return text.format(name=named, path=read_from, file=shlex.quote(file))
