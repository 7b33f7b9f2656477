"""A Recipe as text: complete, with every default, and without secrets."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.recipe.document import Recipe
from echelon.recipe.section import Section
from echelon.recipe.yaml_text import render_yaml

HIDDEN = "***"

_SECRET_KEY = re.compile(r"(^|[_.-])(token|secret|password|passwd|passphrase|(api|access|private|secret)_?key|"
                         r"credentials?)$", re.IGNORECASE)  # fmt: skip
# Tokens of a vocabulary share the word: `eos_token: </s>` is no secret.
_VOCABULARY_KEY = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|special|image|video|audio)_token$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+:[^/\s@]+(?=@)")


def render_recipe(recipe: Recipe, hide_secrets: bool = True) -> str:
    """YAML of the whole recipe, defaults included. `load_recipe` accepts it and gives an equal Recipe, save for
    hidden secrets."""
    mapping = recipe_mapping(recipe)
    return render_yaml(redact(mapping) if hide_secrets else mapping)


def recipe_mapping(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values under the names a file uses. Keys that are null by default and unset are left out."""
    return _plain_section(recipe)


def redact(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which the text under keys such as `api_key`, `hf_token` and `password`, and passwords inside
    addresses, are replaced by `***`."""
    return {key: HIDDEN if _is_secret(key, value) else _redact_value(value) for key, value in mapping.items()}


def _is_secret(key: Any, value: Any) -> bool:
    name = str(key)
    return isinstance(value, str) and bool(_SECRET_KEY.search(name)) and not _VOCABULARY_KEY.search(name)


def _redact_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, list):
        return [_redact_value(item) for item in value]
    return _URL_PASSWORD.sub(HIDDEN, value) if isinstance(value, str) else value


def _plain_section(section: Section) -> dict[str, Any]:
    plain = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value is not None or field.default is not None:
            plain[field.alias or name] = plain_value(value)
    return plain


def plain_value(value: Any) -> Any:
    """A value of a recipe as plain mappings, lists, words and numbers."""
    if isinstance(value, Section):
        return _plain_section(value)
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value
