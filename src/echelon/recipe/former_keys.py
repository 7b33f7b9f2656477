"""Reads keys of earlier versions of echelon: each becomes the keys that replace it, with a line that names them."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.variables import QUOTE_VARIABLE, find_cache_dir
from echelon.recipe.draft import Draft
from echelon.recipe.keys import KeyPath, dotted
from echelon.recipe.yaml_text import render_inline, show_value

Successor = str | Callable[[Any], Mapping[str, Any]]
"""The new dotted key, which takes the value as it is; or a function of the value to the new keys with their values. No
keys: the old one is needless."""


def _describe_elsewhere(machines: Any) -> Mapping[str, Any]:
    """Refuse machines that a recipe describes, with what to write into a file instead. Raises ConfigError."""
    rows = [dict(machine) for machine in machines or () if isinstance(machine, Mapping)]
    if not rows:
        return {}
    named = {row.pop("name", "NAME"): row for row in rows}
    prices = {name: row.pop("usd_per_hour") for name, row in named.items() if "usd_per_hour" in row}
    text: dict[str, Any] = {"region": "REGION", "date": "YYYY-MM-DD", "source": "mine", "usd_per_hour": prices}
    text["machines"] = {name: row for name, row in named.items() if row}
    raise ConfigError(
        f"launch.sagemaker.extra_types is of an earlier version; remove it, and write into {find_cache_dir()}/prices/"
        f"mine.yaml (docs/cost.md): {render_inline([text])}"
    )


FORMER: dict[str, Successor] = {
    "budget.quote": lambda value: {f"launch.env.{QUOTE_VARIABLE}": json.dumps(value)},
    "launch.sagemaker.extra_types": _describe_elsewhere,
    "model.rope.type": "model.rope.rope_type",
}
"""The keys of earlier versions, dotted."""


def read_former(
    path: KeyPath, value: Any, origin: str, former: Mapping[str, Successor] = FORMER
) -> tuple[Mapping[KeyPath, Any], str] | None:
    """Return the paths and values that replace a key of an earlier version, and the line for it; None: it is not one.

    Of a mapping, each value has its own path, so that it joins what the recipe has beside it.
    """
    name = dotted(path)
    if (successor := former.get(name)) is None or value is None:
        return None
    new = {successor: value} if isinstance(successor, str) else successor(value)
    meaning = ", ".join(f"{key}: {show_value(part)}" for key, part in new.items()) or "nothing; remove it"
    note = f"{origin}: {name}: {show_value(value)} is of an earlier version and is read as {meaning}."
    return {leaf: part for key, whole in new.items() for leaf, part in _leaves(tuple(key.split(".")), whole)}, note


def replace_former(draft: Draft, former: Mapping[str, Successor] = FORMER) -> list[str]:
    """Replace keys of earlier versions in `draft`; return a line for each.

    Raises ConfigError if a key and its successor are both given.
    """
    notes = []
    for path in [tuple(name.split(".")) for name in former]:
        origin = draft.origin(path)
        if (found := read_former(path, draft.get(path), origin, former)) is None:
            continue
        draft.remove(path)
        if draft.get(path[:-1]) == {}:
            draft.remove(path[:-1])
        for new, value in found[0].items():
            if draft.holds(new) and new != path[: len(new)]:
                raise ConfigError(
                    f"{origin}: {dotted(path)} is now {dotted(new)}, which is also given ({draft.origin(new)}); keep "
                    f"{dotted(new)}."
                )
            draft.set(new, value, origin)
        notes.append(found[1])
    return notes


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves((*path, key), part)
    else:
        yield path, value
