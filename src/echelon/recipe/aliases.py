"""Converts other tools' spellings of recipe keys, with a note, and refuses those without an equivalent.

The spellings are in `aliases.yaml`.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import dotted, recipe_keys
from echelon.recipe.yaml_text import KeyPath, read_table, show_value

_TABLE = read_table(Path(__file__).with_name("aliases.yaml"))
_NAMES: Mapping[str, str] = _TABLE["names"]
ALIASES: Mapping[str, str] = {name: key for key, names in _NAMES.items() for name in names.split()}
_VALUES: Mapping[str, Mapping[Any, Any]] = _TABLE["values"]
NO_EQUIVALENT: Mapping[str, str] = _TABLE["without_equivalent"]


FREE_MAPPINGS = ("smp",)


def spellings(key: str) -> tuple[str, ...]:
    """Return the names of a recipe key in other tools."""
    return tuple(_NAMES.get(key, "").split())


def read_value(name: str, value: Any) -> Any:
    """Return the equivalent of a value given under a recipe key or another tool's name for it.

    Unknown values are returned unchanged; None means that the key stays unset.
    """
    return _VALUES.get(name, {}).get(value, value) if isinstance(value, Hashable) else value


@dataclass(frozen=True)
class Translation:
    """The recipe key and value for a key and value of another tool. `value` None: the key stays unset."""

    path: KeyPath
    value: Any
    note: str


def translate(path: KeyPath, value: Any, origin: str) -> Translation | None:
    """Convert another tool's key and value; None if there is nothing to convert, also for unknown keys.

    Raises ConfigError for a key without an equivalent.
    """
    name = dotted(path)
    if path[0] in FREE_MAPPINGS:
        return None
    if reason := NO_EQUIVALENT.get(str(path[-1]) if len(path) <= 2 else name):
        raise ConfigError(f"{origin}: {name} has no equivalent in a recipe: {reason}")
    alias, target = _find_alias(path, value)
    key = target or name
    ours = read_value(key, read_value(alias or key, value))
    if alias in ("datasets", "test_datasets"):
        ours = _translate_datasets(value)
    elif target == "track" and isinstance(ours, str):
        ours = [ours]
    elif alias in ("evals_per_epoch", "saves_per_epoch"):
        ours = value and f"1/{value} epochs"
    if target is None and ours is value:
        return None
    meaning = f"{key} left unset" if ours is None else f"{key}: {show_value(ours)}"
    return Translation(tuple(key.split(".")), ours, f"{origin}: {name}: {show_value(value)} is read as {meaning}.")


def apply_aliases(draft: Draft) -> list[str]:
    """Convert other tools' keys and values in `draft` in place; return a note for each.

    Raises ConfigError if a key is given under two spellings or has no equivalent.
    """
    notes = []
    for path, value in list(_candidates(draft.data)):
        origin = draft.origin(path)
        if (translation := translate(path, value, origin)) is None:
            continue
        draft.remove(path)
        if len(path) == 2 and path[0] not in Recipe.model_fields and draft.get(path[:1]) == {}:
            draft.remove(path[:1])
        if draft.holds(translation.path) and translation.value is not None:
            ours = dotted(translation.path)
            raise ConfigError(
                f"{origin}: {dotted(path)} is another spelling of {ours}, which is also given "
                f"({draft.origin(translation.path)}); keep one."
            )
        if translation.value is not None:
            draft.set(translation.path, translation.value, origin)
        notes.append(translation.note)
    return notes


def _find_alias(path: KeyPath, value: Any) -> tuple[str, str] | tuple[None, None]:
    name, word = dotted(path), str(path[-1])
    # `adapter: lora` and `optim: adamw_torch` have the name of a section here, but a word as their value.
    if name in recipe_keys(Recipe) and (isinstance(value, dict) or name not in ALIASES):
        return None, None
    if name in ALIASES:
        return name, ALIASES[name]
    if len(path) == 2 and ALIASES.get(word, "").startswith(f"{path[0]}."):
        return word, ALIASES[word]
    return None, None


def _candidates(data: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Any]]:
    # A word given for a section comes first: `adapter: lora` creates the section that `lora_r: 8` belongs to.
    for key, value in sorted(data.items(), key=lambda item: item[0] not in Recipe.model_fields):
        if isinstance(value, dict):
            yield from (((key, inner), inner_value) for inner, inner_value in value.items())
        else:
            yield (key,), value


def _translate_datasets(value: Any) -> Any:
    """Convert Axolotl's `datasets: [{path, type}]`, where `completion` means plain text."""
    if not isinstance(value, list):
        return value
    renamed = {"type": "format", "ds_type": "format"}
    sources = [
        {renamed.get(key, key): item for key, item in source.items()} if isinstance(source, dict) else source
        for source in value
    ]
    for source in sources:
        if isinstance(source, dict) and source.get("format") == "completion":
            source["format"] = "auto"
    return sources
