"""Loads a Recipe from a file and `key=value` overrides; an error says what to change."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from echelon.ground.errors import ConfigError, Fault
from echelon.ground.stored import read_json, read_text
from echelon.recipe.aliases import (
    ALIASES,
    REPLACED,
    apply_aliases,
    join_former,
    read_former,
    refuse_both,
    replace_former,
    translate,
)
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import dotted, find_unknown_keys, nearest_key, section_fields
from echelon.recipe.messages import explain_errors
from echelon.recipe.names import DIALECTS
from echelon.recipe.render import plain_value
from echelon.recipe.section import expand_list
from echelon.recipe.training import BATCH_KEYS, STEP_KEYS
from echelon.recipe.yaml_text import MAX_TEXT_BYTES, KeyPath, parse_yaml, shorten

COMMAND_LINE = "command line"

Overrides = Sequence[str] | Mapping[str, Any]
"""Overrides of keys of the file, as on the command line (`["train.steps=50"]`) or as values (`{"train.steps": 50}`)."""

# Keys that exclude each other: an override of one removes the others that the file sets.
EXCLUSIVE_KEYS: tuple[tuple[KeyPath, ...], ...] = (
    tuple(("train", key) for key in STEP_KEYS),
    tuple(("train", key) for key in BATCH_KEYS),
    (("model", "checkpoint"), ("model", "config")),
    (("data", "validation"), ("data", "validation_fraction")),
    tuple(("optim", key) for key in ("warmup", "warmup_steps", "warmup_tokens", "warmup_fraction")),
)


def load_recipe(path: Path, overrides: Overrides = (), origin: str = COMMAND_LINE) -> tuple[Recipe, list[str]]:
    """Read a recipe file, apply overrides, and check it; return the recipe and notes for the user.

    `origin` names the source of the overrides in messages. Raises ConfigError, with the file's line or the origin, for
    an invalid recipe.
    """
    return parse_recipe(_read_text(path), str(path), overrides, origin)


def build_recipe(
    mapping: Mapping[str, Any], overrides: Overrides = (), origin: str = COMMAND_LINE
) -> tuple[Recipe, list[str]]:
    """Like `load_recipe`, for the mapping in a recipe file. The mapping is not changed."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"a recipe is a path or a mapping, and this is a {type(mapping).__name__}; give one of them.")
    return _finish(_start_draft(plain_value(dict(mapping)), {}, "recipe"), overrides, origin)


def parse_recipe(
    text: str, source: str, overrides: Overrides = (), origin: str = COMMAND_LINE
) -> tuple[Recipe, list[str]]:
    """Like `load_recipe`, for a text, which messages call `source`."""
    data, origins = parse_yaml(text, source)
    return _finish(_start_draft(data, origins, source), overrides, origin)


def _finish(draft: Draft, overrides: Overrides, origin: str) -> tuple[Recipe, list[str]]:
    refuse_both(draft)
    notes = replace_former(draft) + apply_aliases(draft)
    _write_sources_out(draft)
    for path, value in _read_overrides(overrides, origin):
        notes += _apply_override(draft, path, value, origin)
        _write_sources_out(draft)
    notes += replace_former(draft)  # in a whole section that an override gives
    notes += join_former(draft)
    # sections in the spelling of other tools, by the keys that they stand for
    dialects = [key for key in DIALECTS.own if draft.holds((key,)) or draft.get(("engine",)) == key]
    notes += [line for key in dialects for line in DIALECTS[key](draft)]
    _read_deepspeed(draft)
    _refuse_unknown_keys(draft)
    try:
        return Recipe.model_validate(draft.data), notes
    except ValidationError as error:
        raise explain_errors(error, draft) from None


def _read_deepspeed(draft: Draft) -> None:
    """Replace the path in `deepspeed.config` by the content of that file. Raises ConfigError if it is not JSON."""
    if isinstance(value := draft.get(("deepspeed",)), str):
        raise ConfigError(
            f"{draft.origin(('deepspeed',))}: deepspeed={value} must be a mapping of keys; to train with DeepSpeed set "
            f"engine: deepspeed and deepspeed: {{config: {value}}}; for ZeRO without it set parallel: zero1, zero2 or "
            "fsdp (ZeRO-3)."
        )
    key = ("deepspeed", "config")
    path = draft.get(key)
    if not isinstance(path, str):
        return
    try:
        content = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{draft.origin(key)}: deepspeed.config={path} cannot be read ({error}); give the path of a JSON file with "
            "a DeepSpeed config."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{draft.origin(key)}: deepspeed.config={path} is not a JSON object of DeepSpeed's settings.")
    draft.set(key, content, path)


def _read_text(path: Path) -> str:
    try:
        return read_text(path, MAX_TEXT_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a recipe file, or make one with `echelon init`.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; give a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def _start_draft(data: Any, origins: dict[KeyPath, str], source: str) -> Draft:
    if data is None:
        raise ConfigError(f"{source} is empty; make a recipe to start from with `echelon init`.")
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source} is not a recipe: it must be a mapping of keys; write keys such as run, model, data and train."
        )
    # A section whose lines are all commented out is null in YAML; it gets its defaults.
    return Draft({key: value for key, value in data.items() if value is not None}, origins, source)


def _write_sources_out(draft: Draft) -> None:
    """Expand `train: some/path` to a list, so that the override `data.train.0.weight=2` works."""
    data = draft.get(("data",))
    for key in ("train", "validation"):
        if isinstance(data, dict) and data.get(key) is not None:
            data[key] = expand_list(data[key], "path")


def _read_overrides(overrides: Overrides, origin: str) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(overrides, str):
        raise ConfigError(f"{origin}: {shorten(overrides)!r} is a string; give a list, for example [{overrides!r}].")
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            yield _split_key(str(key)), plain_value(value)
        return
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigError(f"{origin}: {shorten(override)!r} is not KEY=VALUE; for example train.steps=100.")
        yield _split_key(key), parse_yaml(text, f"{origin}, {shorten(override)}")[0]


def _split_key(key: str) -> KeyPath:
    if len(key) > 1000:
        raise ConfigError(f"{shorten(key)!r} is not a recipe key: it has {len(key):,} letters; correct it.")
    return tuple(int(part) if part.isdigit() else part for part in key.strip().split("."))


def _apply_override(draft: Draft, path: KeyPath, value: Any, origin: str) -> list[str]:
    if former := read_former(path, value, origin):
        return [
            former[1],
            *(line for new, part in former[0].items() for line in _apply_override(draft, new, part, origin)),
        ]
    notes = []
    if translation := translate(path, value, origin):
        path, value = translation.path, translation.value
        notes.append(translation.note)
        if value is None:
            draft.remove(path)
            return notes
    if value is not None:
        for other in _alternatives(path):
            # If the overrides give two of them, a rule of the recipe refuses that.
            if draft.origin(other) != origin:
                draft.remove(other)
    draft.set(path, value, origin)
    return notes


def _alternatives(path: KeyPath) -> list[KeyPath]:
    groups = [group for group in EXCLUSIVE_KEYS if path[:2] in group]
    earlier: list[KeyPath] = [tuple(old.split(".")) for old, new in REPLACED.items() if new == dotted(path)]
    return [other for group in groups for other in group if other != path[:2]] + earlier


def _refuse_unknown_keys(draft: Draft) -> None:
    faults = []
    for path, section in find_unknown_keys(draft.data, Recipe):
        nearest = nearest_key(path, Recipe, ALIASES)
        parent = dotted(path[:-1]) or "a recipe"
        hint = f"did you mean {nearest}?" if nearest else f"{parent} has the keys {', '.join(section_fields(section))}"
        faults.append(Fault(draft.origin(path), dotted(path), None, "is not a recipe key", hint))
    if faults:
        raise ConfigError("\n".join(map(str, faults)), faults)
