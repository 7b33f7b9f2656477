"""Writes docs/recipe.md, with every key's type, default and meaning, from the models, and the table of docs/engines.md:
`python -m tests.docs.reference`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.recipe.aliases import ALIASES, NO_EQUIVALENT
from echelon.recipe.names import ENGINES
from echelon.recipe.render import recipe_json_schema
from echelon.recipe.yaml_text import show_value

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class _Key:
    name: str
    schema: Mapping[str, Any]
    required: bool


def render_recipe_reference() -> str:
    """Return the Markdown text of docs/recipe.md."""
    schema = recipe_json_schema()
    parts = [Path(__file__).with_name("reference.md").read_text(encoding="utf-8")]
    for name in schema["properties"]:
        keys = [key for key in _keys(schema, schema) if key.name.partition(".")[0].removesuffix("[]") == name]
        parts.append(_render_section(name, keys, schema))
    parts.append(_render_aliases())
    return "\n".join(parts)


def _keys(section: Mapping[str, Any], root: Mapping[str, Any], prefix: str = "") -> Iterator[_Key]:
    for name, field in section["properties"].items():
        yield _Key(prefix + name, field, name in section.get("required", ()))
        entry = "[]" if any("items" in branch for branch in (field, *field.get("anyOf", ()))) else ""
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


def render_engine_table() -> str:
    """The Markdown table of docs/engines.md: a row for each limited key, with the values that each engine runs."""
    rows = {name: ENGINES[name] for name in ENGINES.own}
    keys = dict.fromkeys(limit.key for row in rows.values() for limit in row.limits)
    lines = ["| | " + " | ".join(f"`{name}`" for name in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    strategies = ["all" if row.strategies is None else ", ".join(row.strategies) for row in rows.values()]
    lines.append("| strategies of `parallel` | " + " | ".join(strategies) + " |")
    for key in keys:
        cells = []
        for row in rows.values():
            values = next((limit.values for limit in row.limits if limit.key == key), None)
            cells.append("all" if values is None else ", ".join(f"`{show_value(value)}`" for value in values))
        lines.append(f"| `{key}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def replace_table(page: str) -> str:
    """Return docs/engines.md with the table between its marks."""
    head, begin, rest = page.partition("<!-- engines: begin -->\n")
    return head + begin + render_engine_table() + "<!-- engines: end -->" + rest.partition("<!-- engines: end -->")[2]


if __name__ == "__main__":
    (DOCS / "recipe.md").write_text(render_recipe_reference(), encoding="utf-8")
    engines = DOCS / "engines.md"
    engines.write_text(replace_table(engines.read_text(encoding="utf-8")), encoding="utf-8")
