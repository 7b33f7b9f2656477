"""From a file and `key=value` words to a Recipe, or to one message that says what to change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from echelon.errors import ConfigError
from echelon.recipe.aliases import ALIASES, apply_aliases, translate
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.inputs import expand_sources
from echelon.recipe.keys import KeyPath, dotted, find_unknown_keys, nearest_key, section_fields
from echelon.recipe.messages import explain_errors
from echelon.recipe.training import BATCH_KEYS, STEP_KEYS
from echelon.recipe.unbuilt import check_built
from echelon.recipe.yaml_text import parse_yaml, shorten

COMMAND_LINE = "command line"

# Of these, one is given: an override of one replaces the file's other.
EXCLUSIVE_KEYS: tuple[tuple[KeyPath, ...], ...] = (
    tuple(("train", key) for key in STEP_KEYS),
    tuple(("train", key) for key in BATCH_KEYS),
    (("model", "checkpoint"), ("model", "config")),
    (("data", "validation"), ("data", "validation_fraction")),
    (("optim", "warmup_steps"), ("optim", "warmup_fraction")),
    (("optim", "warmup_tokens"), ("optim", "warmup_fraction")),
    (("checkpoint", "every_steps"), ("checkpoint", "saves_per_epoch")),
    (("train", "eval_every"), ("train", "evals_per_epoch")),
)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """Read a recipe file, apply `key=value` overrides, and check it; returns it with notes to show the user.

    Raises ConfigError, naming the file's line or the command line, for anything the recipe cannot mean or that is not
    built yet.
    """
    recipe, notes = parse_recipe(_read_text(path), str(path), overrides)
    check_built(recipe)
    return recipe, notes


def parse_recipe(text: str, source: str, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """As `load_recipe`, of a recipe's text; `source` is what messages call it. What is not built is let through."""
    draft = _parse_draft(text, source)
    notes = apply_aliases(draft)
    _write_sources_out(draft)
    for override in overrides:
        notes += _apply_override(draft, override)
        _write_sources_out(draft)
    _refuse_unknown_keys(draft)
    try:
        return Recipe.model_validate(draft.data), notes
    except ValidationError as error:
        raise ConfigError(explain_errors(error, draft)) from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a recipe file, or make one with `echelon init`.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; a recipe is a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def _parse_draft(text: str, source: str) -> Draft:
    data, origins = parse_yaml(text, source)
    if data is None:
        raise ConfigError(f"{source} is empty; make a recipe to start from with `echelon init`.")
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source} is not a recipe: it must be a mapping of keys, such as run, model, data and train."
        )
    # A section whose lines are all commented out reads as null, and means its defaults.
    return Draft({key: value for key, value in data.items() if value is not None}, origins, source)


def _write_sources_out(draft: Draft) -> None:
    """Write `train: some/path` as a list, so that `data.train.0.weight=2` finds its place."""
    data = draft.get(("data",))
    for key in ("train", "validation"):
        if isinstance(data, dict) and data.get(key) is not None:
            data[key] = expand_sources(data[key])


def _apply_override(draft: Draft, override: str) -> list[str]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{COMMAND_LINE}: {shorten(override)!r} is not KEY=VALUE; for example train.steps=100.")
    path: KeyPath = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    value: Any = parse_yaml(text, f"{COMMAND_LINE}, {shorten(override)}")[0]
    notes = []
    if translation := translate(path, value, COMMAND_LINE):
        path, value = translation.path, translation.value
        notes.append(translation.note)
    if value is not None or path == ("train", "eval_every"):  # there null is a choice too: only at the end
        for other in _alternatives(path):
            # Two of them on the same command line are a contradiction, and are refused by the recipe's own rule.
            if draft.origin(other) != COMMAND_LINE:
                draft.remove(other)
    draft.set(path, value, COMMAND_LINE)
    return notes


def _alternatives(path: KeyPath) -> list[KeyPath]:
    return [other for group in EXCLUSIVE_KEYS if path[:2] in group for other in group if other != path[:2]]


def _refuse_unknown_keys(draft: Draft) -> None:
    lines = []
    for path, section in find_unknown_keys(draft.data, Recipe):
        nearest = nearest_key(path, Recipe, ALIASES)
        parent = dotted(path[:-1]) or "a recipe"
        hint = f"did you mean {nearest}?" if nearest else f"{parent} has the keys {', '.join(section_fields(section))}."
        lines.append(f"{draft.origin(path)}: {dotted(path)} is not a recipe key; {hint}")
    if lines:
        raise ConfigError("\n".join(lines))
