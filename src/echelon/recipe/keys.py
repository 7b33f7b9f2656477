"""The keys of a recipe: lists them, finds unknown ones, and suggests the most similar known key."""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from echelon.recipe.section import Section
from echelon.recipe.yaml_text import KeyPath

NEAR_ENOUGH = 0.6
SAME_SECTION_BONUS = 0.2


def dotted(path: KeyPath) -> str:
    """Return a path such as `("data", "train", 0, "path")` as the user writes it: `data.train.0.path`."""
    return ".".join(str(part) for part in path)


def section_fields(section: type[Section]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their names in a recipe, which may be Python keywords (`async`, `from`)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def subsection(annotation: Any) -> type[Section] | None:
    """Return the section in a type such as `Section`, `str | Section` or `tuple[Section, ...]`; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    sections = (subsection(argument) for argument in get_args(annotation))
    return next((section for section in sections if section), None)


@cache
def recipe_keys(section: type[Section], prefix: str = "") -> Mapping[str, FieldInfo]:
    """Return all dotted keys below `section`, including subsections; entries of a list are written `[]`."""
    keys: dict[str, FieldInfo] = {}
    for name, field in section_fields(section).items():
        key = f"{prefix}{name}"
        keys[key] = field
        if child := subsection(field.annotation):
            entry = "[]" if get_origin(field.annotation) is tuple else ""
            keys.update(recipe_keys(child, f"{key}{entry}."))
    return keys


def find_unknown_keys(data: Any, section: type[Section], path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[Section]]]:
    """Yield each key of `data` that `section` does not have, with its section. Free mappings are not searched."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from find_unknown_keys(item, section, (*path, index))
    elif isinstance(data, dict):
        fields = section_fields(section)
        for key, value in data.items():
            if key not in fields:
                kinds = [kind for kind in section.plugins if key in kind]
                if all(key in kind.own and not hasattr(kind[key], "section") for kind in kinds):
                    yield (*path, key), section
            elif child := subsection(fields[key].annotation):
                yield from find_unknown_keys(value, child, (*path, key))


def nearest_key(path: KeyPath, root: type[Section], spellings: Mapping[str, str]) -> str | None:
    """Return the key of `root` most similar to `path` by its last part, in any section; the same section comes first.

    `spellings` maps further names, those of other tools, to keys of `root`.
    """
    # Entries of a list are compared with `[]` as their index, and reported with their own.
    indices = [part for part in path if isinstance(part, int)]
    generic = dotted(path)
    for index in indices:
        generic = generic.replace(f".{index}.", "[].", 1)
    section, _, word = generic.rpartition(".")
    word = word[:100].lower()  # no key is longer, and each is compared with it
    candidates = {key: key for key in recipe_keys(root)} | dict(spellings)

    def likeness(candidate: str) -> float:
        return difflib.SequenceMatcher(None, word, candidate.rpartition(".")[2]).ratio()

    def rank(candidate: str) -> float:
        return likeness(candidate) + SAME_SECTION_BONUS * (candidate.rpartition(".")[0] == section)

    best = max(candidates, key=rank)
    if likeness(best) < NEAR_ENOUGH:
        return None
    key = candidates[best]
    for index in indices:
        key = key.replace("[].", f".{index}.", 1)
    return key.replace("[].", ".0.")
