"""Messages for the user, file and line, key, value, rule and fix: made from pydantic's errors, and read in parts."""

import difflib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from echelon.ground.errors import ConfigError, Fault
from echelon.ground.redaction import HIDDEN, redact
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import NEAR_ENOUGH, dotted, recipe_keys
from echelon.recipe.section import read_count
from echelon.recipe.yaml_text import KeyPath, read_table, show_value

_TABLE: Mapping[str, Mapping[str, str]] = read_table(Path(__file__).with_name("messages.yaml"))

_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# What other versions of YAML, and people, write for a boolean.
_FLAGS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}

_PLACE = re.compile(r"(?P<place>[^:;\n]+, line \d+|command line): ")
_FIX = re.compile(r"(?P<rest>.*\S)(?:; |\n)(?P<fix>\S.*)", re.DOTALL)
# A value in brackets or quotes, or without spaces.
_VALUE = r"""(?P<value>\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|\S+?)(?=[:,]?(?:\s|$))"""
_ASSIGNED = re.compile(rf"(?P<key>[a-z]\w*(?:\.[\w/-]+)*)={_VALUE}[:,]?\s*")
_SECTION = re.compile(r"(?P<key>[a-z]+): ")
_OPTION = re.compile(r"(?P<key>--[a-z][a-z-]*)[:,]?\s*")
_NAMED = re.compile(rf"(?<![\w.=/-])(?P<key>[a-z]\w*(?:\.\w+)+)(?:={_VALUE})?")
_INDEX = re.compile(r"\.\d+(?=\.|$)")
# How a fix begins that stands in place of a rule: `--dtype f8: choose one of fp32, bf16.`
_ADVICE = re.compile(r"(?:choose|give|leave|set|use|write) ")
_FREE = ("model.config.", "data.train", "launch.", "smp.")


def explain_errors(error: ValidationError, draft: Draft) -> ConfigError:
    """Return the error for the user, with a line for each wrong key.

    A line is `recipe.yaml, line 9: train.steps=0 must be at least 1; use a larger number.`
    """
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        # A default could not be computed from another key, which is wrong and has its own line.
        if detail["type"] != "default_factory_not_called":
            by_key.setdefault(_given_path(detail, draft), []).append(detail)
    lines, faults = zip(*(_explain(path, details, draft) for path, details in by_key.items()), strict=True)
    return ConfigError("\n".join(lines), faults)


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


def _explain(path: KeyPath, details: list[ErrorDetails], draft: Draft) -> tuple[str, Fault]:
    """The line about a key, and its parts."""
    origin, first = draft.origin(path), details[0]
    if first["type"] == "value_error":
        return _explain_rule(str(first["ctx"]["error"]), origin, draft)
    if first["type"] == "missing" and draft.get(path) is None:
        fault = Fault(origin, dotted(path), None, "is missing", "add it to the recipe")
    else:
        rules = list(dict.fromkeys(_rule(detail) for detail in details))
        fix = _fix(details, draft.get(path))
        fault = Fault(origin, dotted(path), _show(path, draft), f"must be {' or '.join(rules)}", fix)
    return str(fault), fault


def _explain_rule(message: str, origin: str, draft: Draft) -> tuple[str, Fault]:
    """The line about a broken rule of a section. A rule on several keys has the place of the first that it names."""
    fault = read_fault(message)
    named = fault.key or next(iter(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message)), "")
    path: KeyPath = tuple(int(part) if part.isdigit() else part for part in named.split("."))
    place = draft.origin(path)
    place = origin if place == draft.source else place
    shown = None if draft.get(path) is None else _show(path, draft)
    value = shown if shown is not None and shown in message else fault.value
    return f"{place}: {message}", replace(fault, place=place, key=named or None, value=value)


def _show(path: KeyPath, draft: Draft) -> str:
    """The value of a key on a line, without secrets."""
    shown = redact({path[-1]: draft.get(path)})[path[-1]] if path else None
    return HIDDEN if shown == HIDDEN else show_value(shown)


def _rule(detail: ErrorDetails) -> str:
    return _fill("rules", detail) or detail["msg"].removeprefix("Input should be ")


def _fill(table: str, detail: ErrorDetails) -> str | None:
    """The row of a table for this type of error, with its limits filled in."""
    context: dict[str, Any] = detail.get("ctx", {})
    template = _TABLE[table].get(detail["type"])
    return None if template is None else template.format(**context).replace("'", "")


def _fix(details: Sequence[ErrorDetails], value: Any) -> str | None:
    """What to write instead: what the value was probably meant to be, or by the first rule that is not of names."""
    of_names = [detail for detail in details if detail["type"] in ("literal_error", "name")]
    others = [detail for detail in details if detail not in of_names]
    names = [name for detail in of_names for name in re.split(", | or ", _rule(detail))]
    if isinstance(value, str):
        if near := difflib.get_close_matches(value.lower(), names, 1, NEAR_ENOUGH):
            return f"did you mean {near[0]}?"
        if meant := _find_meaning(value, {detail["type"] for detail in others}):
            return f"use {meant}"
    return _fill("fixes", others[0]) if others else f"use {names[0]}" if len(names) == 1 else "use one of them"


def _find_meaning(text: str, expected: Set[str]) -> str | None:
    """The flag or the number that a text stands for, if a value of these types of error should have been one."""
    if "bool_type" in expected:
        return _FLAGS.get(text.lower())
    number = read_count(text)
    if number is not None and ("float_type" in expected or ("int_type" in expected and number.denominator == 1)):
        return f"{float(number):g}" if number.denominator > 1 else str(number)
    return text.strip() if "float_type" in expected and _DECIMAL.fullmatch(text.strip()) else None


def read_fault(message: str) -> Fault:
    """Return the parts of a message about one thing; those that it does not have are None.

    Most errors are raised with a message alone, `recipe.yaml, line 9: parallel.tp=3 does not divide 8; use tp=4.`: the
    place, if there is one; what is wrong, beginning with the key and its value, if it is about one; the fix after the
    last semicolon, or on the last line.
    """
    origin = _PLACE.match(message)
    text = message[origin.end() :] if origin else message
    found = _FIX.fullmatch(text)
    rest, fix = (found["rest"], found["fix"].removesuffix(".")) if found else (text.removesuffix("."), None)
    key, value, rule = _read_subject(rest)
    if fix is None and _ADVICE.match(rule):
        rule, fix = "", rule
    return Fault(origin["place"] if origin else None, key, value, rule or None, fix)


def _read_subject(text: str) -> tuple[str | None, str | None, str]:
    """The key, its value and the rule. A message that begins with neither key nor option may name a key later."""
    if match := _ASSIGNED.match(text):
        return match["key"], match["value"], text[match.end() :]
    if (match := _SECTION.match(text)) and match["key"] in Recipe.model_fields:
        return match["key"], None, text[match.end() :]
    if match := _OPTION.match(text):
        return match["key"], None, text[match.end() :]
    for match in _NAMED.finditer(text):
        if _INDEX.sub("[]", match["key"]) in recipe_keys(Recipe) or match["key"].startswith(_FREE):
            return match["key"], match["value"], text[match.end() :].lstrip(" :,") if match.start() == 0 else text
    return None, None, text
