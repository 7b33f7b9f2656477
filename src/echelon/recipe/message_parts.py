"""Reads the parts of a message in echelon's form: `recipe.yaml, line 9: parallel.tp=3 does not divide 8; use tp=4.`

Most errors are raised with a message alone. They have this form: the place, if there is one; what is wrong, beginning
with the key and its value, if it is about one; the fix after the last semicolon, or on the last line.
"""

import re

from echelon.ground.errors import Fault
from echelon.recipe.document import Recipe
from echelon.recipe.keys import recipe_keys

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


def read_fault(message: str) -> Fault:
    """Return the parts of a message about one thing; those that it does not have are None."""
    place = _PLACE.match(message)
    text = message[place.end() :] if place else message
    found = _FIX.fullmatch(text)
    rest, fix = (found["rest"], found["fix"].removesuffix(".")) if found else (text.removesuffix("."), None)
    key, value, rule = _read_subject(rest)
    if fix is None and _ADVICE.match(rule):
        rule, fix = "", rule
    return Fault(place["place"] if place else None, key, value, rule or None, fix)


def _read_subject(text: str) -> tuple[str | None, str | None, str]:
    """The key, its value and the rule. A message that begins with neither key nor option may name a key later."""
    if match := _ASSIGNED.match(text):
        return match["key"], match["value"], text[match.end() :]
    if (match := _SECTION.match(text)) and match["key"] in Recipe.model_fields:
        return match["key"], None, text[match.end() :]
    if match := _OPTION.match(text):
        return match["key"], None, text[match.end() :]
    for match in _NAMED.finditer(text):
        if _is_key(match["key"]):
            return match["key"], match["value"], text[match.end() :].lstrip(" :,") if match.start() == 0 else text
    return None, None, text


def _is_key(name: str) -> bool:
    return _INDEX.sub("[]", name) in recipe_keys(Recipe) or name.startswith(_FREE)
