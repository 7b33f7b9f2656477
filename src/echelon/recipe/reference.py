"""Generates docs/recipe.md: every key with its type, default and meaning, from the descriptions in the models."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.ground.stored import read_text
from echelon.recipe.aliases import ALIASES, NO_EQUIVALENT
from echelon.recipe.schema import recipe_json_schema


@dataclass(frozen=True)
class _Key:
    name: str
    schema: Mapping[str, Any]
    required: bool


def render_recipe_reference() -> str:
    """Return the Markdown text of docs/recipe.md."""
    schema = recipe_json_schema()
    parts = [read_text(Path(__file__).with_name("reference.md"))]
    for name in schema["properties"]:
        keys = [key for key in _keys(schema, schema) if key.name.partition(".")[0] == name]
        parts.append(_render_section(name, keys, schema))
    parts.append(_render_aliases())
    return "\n".join(parts)


def _keys(section: Mapping[str, Any], root: Mapping[str, Any], prefix: str = "") -> Iterator[_Key]:
    for name, field in section["properties"].items():
        yield _Key(prefix + name, field, name in section.get("required", ()))
        entry = "[]" if "items" in field else ""
        for reference in _references(field):
            yield from _keys(root["$defs"][reference], root, f"{prefix}{name}{entry}.")


def _references(field: Mapping[str, Any]) -> list[str]:
    branches = [field, field.get("items", {}), *field.get("anyOf", ()), *field.get("oneOf", ())]
    nested = [inner for branch in branches[2:] for inner in _references(branch)]
    return [branch["$ref"].rpartition("/")[2] for branch in branches[:2] if "$ref" in branch] + nested


def _render_section(name: str, keys: list[_Key], root: Mapping[str, Any]) -> str:
    head, *inner = keys
    is_section = "$ref" in head.schema
    lines = [f"## {name}", ""]
    if is_section:
        lines += [root["$defs"][_references(head.schema)[0]]["description"], ""]
    lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for key in inner if is_section else keys:
        meaning = str(key.schema.get("description", ""))
        cells = (f"`{key.name}`", _describe_type(key.schema), _describe_default(key), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _describe_type(field: Mapping[str, Any]) -> str:
    if branches := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(_describe_type(branch) for branch in branches if branch.get("type") != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "prefixItems" in field:
        return f"list of {len(field['prefixItems'])} numbers"
    if field.get("type") == "array":
        return f"list of {_describe_type(field['items'])}"
    kinds = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text"}
    example = f" such as `{field['examples'][0]}`" if "examples" in field else ""
    return kinds.get(field.get("type", ""), "mapping") + _describe_range(field) + example


def _describe_range(field: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]:g}" if field[key] < 1e6 else f"{sign} {field[key]}"
              for key, sign in signs.items() if key in field]  # fmt: skip
    return f" {', '.join(limits)}" if limits else ""


def _describe_default(key: _Key) -> str:
    if key.required:
        return "required"
    default = key.schema.get("default")
    if default is None or "$ref" in key.schema:  # the keys of a section in a section have rows of their own
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _render_aliases() -> str:
    lines = [
        "## Other tools' spellings", "",
        "A name without a dot is accepted at the top level and in its section. From HF, Axolotl, LLaMA-Factory, "
        "torchtitan and Automodel.", "",
        "| Key | Also accepted |", "|---|---|",
    ]  # fmt: skip
    for key in dict.fromkeys(ALIASES.values()):
        names = ", ".join(f"`{name}`" for name, target in ALIASES.items() if target == key)
        lines.append(f"| `{key}` | {names} |")
    lines += ["", "These keys have no equivalent and are refused:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in NO_EQUIVALENT.items()]
    return "\n".join(lines) + "\n"
