"""Recipe keys whose features are not built yet.

The schema includes planned features, so that recipes stay valid. A row has a key, the values that work besides its
default, and what is possible now. Whoever builds a feature deletes its row or a word of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.keys import KeyPath, dotted, recipe_keys
from echelon.recipe.render import plain_value
from echelon.recipe.section import Section
from echelon.recipe.yaml_text import show_value
from echelon.redaction import redact


@dataclass(frozen=True)
class Unbuilt:
    """A key for which only the default and the values in `built` work."""

    key: str
    possible: str
    built: tuple[Any, ...] = ()


UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("tensorflow.strategy", "multi_worker, mirrored or single", ("mirrored", "single")),
)


def check_built(recipe: Recipe) -> None:
    """Raise ConfigError for the first key whose value is not built yet, with the values that work."""
    fields = recipe_keys(Recipe)
    for row in UNBUILT:
        default = fields[row.key].get_default(call_default_factory=True)
        for path, value in _values(recipe, row.key.replace("[]", ".[]").split(".")):
            if value != default and value not in row.built and type(value) not in row.built:
                shown = show_value(redact(plain_value(value)))
                raise ConfigError(f"{dotted(path)}={shown} is not built yet; possible now: {row.possible}.")


def _values(value: Any, parts: list[str], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if not parts:
        yield path, value
    elif parts[0] == "[]":
        for index, item in enumerate(value):
            yield from _values(item, parts[1:], (*path, index))
    elif isinstance(value, Section):
        names = {field.alias or name: name for name, field in type(value).model_fields.items()}
        yield from _values(getattr(value, names[parts[0]]), parts[1:], (*path, parts[0]))
