"""Converts pydantic's errors to a message for the user: file and line, key, value, rule."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from echelon.recipe.draft import Draft
from echelon.recipe.keys import KeyPath, dotted
from echelon.recipe.yaml_text import read_table, show_value

_RULES: Mapping[str, str] = read_table(Path(__file__).with_name("messages.yaml"))


def explain_errors(error: ValidationError, draft: Draft) -> str:
    """Return one line for each wrong key: `recipe.yaml, line 9: train.steps=0 must be at least 1.`"""
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        # A default could not be computed from another key, which is wrong and has its own line.
        if detail["type"] != "default_factory_not_called":
            by_key.setdefault(_given_path(detail, draft), []).append(detail)
    return "\n".join(_explain(path, details, draft) for path, details in by_key.items())


def _given_path(detail: ErrorDetails, draft: Draft) -> KeyPath:
    """Return the path of the error without the names that pydantic gives to the branches of a union."""
    path: KeyPath = ()
    for part in detail["loc"]:
        container = draft.get(path)
        is_there = part in container if isinstance(container, dict) else (
            isinstance(container, list) and isinstance(part, int) and part < len(container)
        )  # fmt: skip
        if is_there or (detail["type"] == "missing" and isinstance(part, str) and part == detail["loc"][-1]):
            path = (*path, part)
    return path


def _explain(path: KeyPath, details: list[ErrorDetails], draft: Draft) -> str:
    origin, first = draft.origin(path), details[0]
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        # A rule on several keys has no line; the message refers to the line of the first key that it names.
        named = re.search(r"[a-z_]+(\.[a-z_]+)+", message)
        named_origin = draft.origin(tuple(named.group().split("."))) if named else draft.source
        return f"{origin if named_origin == draft.source else named_origin}: {message}"
    if first["type"] == "missing" and draft.get(path) is None:
        return f"{origin}: {dotted(path)} is missing; add it to the recipe."
    rules = list(dict.fromkeys(_rule(detail) for detail in details))
    return f"{origin}: {dotted(path)}={show_value(draft.get(path))} must be {' or '.join(rules)}."


def _rule(detail: ErrorDetails) -> str:
    if (template := _RULES.get(detail["type"])) is None:
        return detail["msg"].removeprefix("Input should be ")
    context: dict[str, Any] = detail.get("ctx", {})
    return template.format(**context).replace("'", "")
