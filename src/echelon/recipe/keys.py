"""The keys of a recipe: listing them, finding the unknown ones, and the key someone probably meant."""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from echelon.recipe.section import Section

KeyPath = tuple[str | int, ...]

NEAR_ENOUGH = 0.6
SAME_SECTION_BONUS = 0.2


def dotted(path: KeyPath) -> str:
    """`("data", "train", 0, "path")` as the user writes it: `data.train.0.path`."""
    return ".".join(str(part) for part in path)


def section_fields(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section under the names a recipe uses for them (`async`, `from`)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def subsection(annotation: Any) -> type[Section] | None:
    """The section inside a type such as `Section`, `str | Section` or `tuple[Section, ...]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (subsection(argument) for argument in get_args(annotation))
    return next((section for section in found if section), None)


@cache
def recipe_keys(section: type[Section], prefix: str = "") -> Mapping[str, FieldInfo]:
    """Every key below `section`, dotted, sections themselves included; an entry of a list is written `[]`."""
    keys: dict[str, FieldInfo] = {}
    for name, field in section_fields(section).items():
        key = f"{prefix}{name}"
        keys[key] = field
        if child := subsection(field.annotation):
            entry = "[]" if _is_list(field) else ""
            keys.update(recipe_keys(child, f"{key}{entry}."))
    return keys


def find_unknown_keys(data: Any, section: type[Section], path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[Section]]]:
    """Each key of `data` that `section` does not have, with the section it stands in. Free mappings are not entered."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from find_unknown_keys(item, section, (*path, index))
    elif isinstance(data, dict):
        fields = section_fields(section)
        for key, value in data.items():
            if key not in fields:
                yield (*path, key), section
            elif child := subsection(fields[key].annotation):
                yield from find_unknown_keys(value, child, (*path, key))


def nearest_key(path: KeyPath, root: type[Section], spellings: Mapping[str, str]) -> str | None:
    """The key of `root` most like `path`: near by its last word, in any section, the same section first.

    `spellings` maps further names (other tools') to keys of `root`.
    """
    # An entry of a list is compared under its generic name and named under its own.
    indices = [part for part in path if isinstance(part, int)]
    generic = dotted(path)
    for index in indices:
        generic = generic.replace(f".{index}.", "[].", 1)
    section, _, word = generic.rpartition(".")
    candidates = {key: key for key in recipe_keys(root)} | dict(spellings)

    def likeness(candidate: str) -> float:
        return difflib.SequenceMatcher(None, word.lower(), candidate.rpartition(".")[2]).ratio()

    def rank(candidate: str) -> float:
        return likeness(candidate) + SAME_SECTION_BONUS * (candidate.rpartition(".")[0] == section)

    best = max(candidates, key=rank)
    if likeness(best) < NEAR_ENOUGH:
        return None
    key = candidates[best]
    for index in indices:
        key = key.replace("[].", f".{index}.", 1)
    return key.replace("[].", ".0.")


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple
